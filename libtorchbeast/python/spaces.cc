#include "spaces.h"

#include <google/protobuf/util/json_util.h>

#include <stdexcept>
#include <string>

namespace torchbeast::python {

namespace {

namespace util = google::protobuf::util;

wire::Space parse(const py::object& json) {
  wire::Space space;
  const auto status = util::JsonStringToMessage(py::cast<std::string>(json), &space);
  if (!status.ok()) {
    throw std::invalid_argument("a space that can't be sent: " + status.ToString());
  }
  return space;
}

}  // namespace

py::module_ gym_module() { return py::module_::import("libtorchbeast_gym"); }

wire::Space space_from_python(py::handle space, bool is_action) {
  return parse(gym_module().attr("space_to_json")(space, is_action));
}

wire::Space space_of_observation(py::handle observation) {
  return parse(gym_module().attr("observation_to_json")(observation));
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
