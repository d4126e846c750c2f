#include "spaces.h"

#include <google/protobuf/util/json_util.h>

#include <stdexcept>
#include <string>

namespace torchbeast::python {

namespace util = google::protobuf::util;

py::module_ gym_module() { return py::module_::import("libtorchbeast_gym"); }

void add_json(const py::object& json, wire::EnvHello* hello) {
  wire::EnvHello more;
  const auto status = util::JsonStringToMessage(py::cast<std::string>(json), &more);
  if (!status.ok()) {
    throw std::invalid_argument("a hello that can't be sent: " + status.ToString());
  }
  hello->MergeFrom(more);
}

py::object space_to_python(const wire::Space& space) {
  util::JsonPrintOptions options;
  options.always_print_enums_as_ints = true;
  std::string json;
  const auto status = util::MessageToJsonString(space, &json, options);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  return gym_module().attr("space_from_json")(json);
}

}  // namespace torchbeast::python
