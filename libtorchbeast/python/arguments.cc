#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>

#include "bindings.h"

namespace torchbeast::python {
namespace {

using namespace py::literals;

// `value` is what was given, in some unit.
Milliseconds duration(double milliseconds, double value, const std::string& name) {
  if (!(value >= 0)) {  // also if it is NaN
    throw std::invalid_argument(
        name + "=" + std::string(py::str(py::float_(value))) +
        ": a duration must be at least 0; inf stands for no limit");
  }
  const auto longest = static_cast<double>(kNever.count());
  return Milliseconds(static_cast<int64_t>(std::ceil(std::min(milliseconds, longest))));
}

template <typename T>
T argument(py::handle value, const std::string& name, const char* wanted) {
  try {
    return py::cast<T>(value);
  } catch (const py::cast_error&) {  // only the type: the value may be a secret
    throw py::type_error(name + " must be " + wanted + ", not " +
                         Py_TYPE(value.ptr())->tp_name);
  }
}

Security to_security(const py::kwargs& given) {
  const py::object read = python_half("security").attr("read")(**given);
  Security security;
  std::tie(security.tls, security.insecure, security.ca, security.cert, security.key,
           security.server_name, security.token) =
      py::cast<std::tuple<bool, bool, std::string, std::string, std::string,
                          std::string, std::string>>(read);
  return security;
}

py::str show(const Security& security) {
  return python_half("security")
      .attr("show")(
          "tls"_a = security.tls, "tls_ca"_a = !security.ca.empty(),
          "tls_cert"_a = !security.cert.empty(), "tls_key"_a = !security.key.empty(),
          "tls_server_name"_a = security.server_name,
          "token"_a = !security.token.empty(), "insecure"_a = security.insecure);
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

Milliseconds to_milliseconds(double milliseconds, const std::string& name) {
  return duration(milliseconds, milliseconds, name);
}

Milliseconds to_seconds(double seconds, const std::string& name) {
  return duration(seconds * 1000, seconds, name);
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
  for (const auto& [key, value] : argument<py::dict>(given, "expected", "a dict")) {
    const auto name = argument<std::string>(key, "a key of expected", "a str");
    const std::string what = "expected['" + name + "']";
    if (name == "name") {
      expected.name = argument<std::string>(value, what, "a str");
    } else if (name == "num_envs") {
      expected.num_envs = argument<int64_t>(value, what, "an int");
    } else if (name == "settings") {
      using Settings = decltype(expected.settings);
      expected.settings = argument<Settings>(value, what, "a dict of str to str");
    } else {
      throw std::invalid_argument(
          "expected may have name, num_envs and settings, but has " + name);
    }
  }
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
