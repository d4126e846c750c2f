#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>

#include "bindings.h"

namespace torchbeast::python {
namespace {

Security to_security(const py::kwargs& given) {
  const py::object read = call_half("arguments", "read_security", given);
  Security security;
  std::tie(security.tls, security.ca, security.cert, security.key, security.server_name,
           security.token, security.insecure) =
      py::cast<std::tuple<bool, std::string, std::string, std::string, std::string,
                          std::string, bool>>(read);
  return security;
}

py::str show(const Security& security) {
  return call_half("arguments", "show_security", security.tls, !security.ca.empty(),
                   !security.cert.empty(), !security.key.empty(), security.server_name,
                   !security.token.empty(), security.insecure);
}

}  // namespace

void bind_security(py::module_& m) {
  py::class_<Security>(m, "Security", doc("Security"))
      .def(py::init(&to_security))
      .def("__repr__", &show);
}

py::module_ python_half(const std::string& name) {
  return py::module_::import(("libtorchbeast_" + name).c_str());
}

const char* doc(const char* name) {
  const py::object text = python_half("docs").attr("DOCS")[name];
  const char* const utf8 = PyUnicode_AsUTF8(text.ptr());
  if (utf8 == nullptr) throw py::error_already_set();
  return utf8;
}

Milliseconds to_milliseconds(double value, const std::string& name, double unit) {
  if (!(value >= 0)) {  // also if it is NaN
    throw std::invalid_argument(
        name + "=" + std::string(py::str(py::float_(value))) +
        ": a duration must be at least 0; inf stands for no limit");
  }
  const auto longest = static_cast<double>(kNever.count());
  return Milliseconds(static_cast<int64_t>(std::ceil(std::min(value * unit, longest))));
}

Milliseconds to_seconds(double seconds, const std::string& name) {
  return to_milliseconds(seconds, name, 1000);
}

Milliseconds to_positive_seconds(double seconds, const std::string& name) {
  if (seconds == 0) throw std::invalid_argument(name + " must be above 0 seconds");
  return to_seconds(seconds, name);
}

size_t to_size(int64_t value, const std::string& name, int64_t least) {
  if (value < least) {
    throw std::invalid_argument(name + " must be at least " + std::to_string(least) +
                                ", not " + std::to_string(value));
  }
  return static_cast<size_t>(value);
}

ExpectedEnvironment to_expected(const py::object& given) {
  ExpectedEnvironment expected;
  if (given.is_none()) return expected;
  const py::object read = call_half("arguments", "read_expected", given);
  std::tie(expected.name, expected.num_envs, expected.settings) =
      py::cast<std::tuple<std::string, int64_t, decltype(expected.settings)>>(read);
  return expected;
}

py::str to_text(const std::string& text) {
  return py::bytes(text).attr("decode")("utf-8", "backslashreplace");
}

py::tuple to_tuple(const std::pair<std::vector<Event>, uint64_t>& taken) {
  const char* const kinds[] = {"lost", "returned", "refused", "env_error"};
  py::list events;
  for (const Event& event : taken.first) {
    events.append(py::make_tuple(event.time, kinds[event.kind], to_text(event.text)));
  }
  return py::make_tuple(events, taken.second);
}

}  // namespace torchbeast::python
