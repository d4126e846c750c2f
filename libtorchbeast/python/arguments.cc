#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "bindings.h"

namespace torchbeast::python {
namespace {

// `value` is what was given, in some unit.
Milliseconds duration(double milliseconds, double value, const std::string& name,
                      bool is_allowed) {
  if (!is_allowed) {
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
  } catch (const py::cast_error&) {
    throw py::type_error(name + " must be " + wanted + ", not " +
                         std::string(py::repr(value)));
  }
}

std::string read_pem(py::handle value, const std::string& name) {
  const auto path = argument<std::filesystem::path>(value, name, "a path");
  const std::string what = name + ": '" + path.string() + "' ";
  errno = std::filesystem::is_directory(path) ? EISDIR : 0;
  std::ifstream file;
  if (errno == 0) file.open(path, std::ios::binary);
  if (!file.is_open()) {
    throw std::invalid_argument(what + "cannot be read: " + std::strerror(errno));
  }
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  if (text.find("-----BEGIN ") == std::string::npos) {
    throw std::invalid_argument(what +
                                "is not a PEM file: it has no line with -----BEGIN");
  }
  return text;
}

}  // namespace

Milliseconds to_milliseconds(double milliseconds, const std::string& name) {
  return duration(milliseconds, milliseconds, name, milliseconds >= 0);  // not if NaN
}

Milliseconds to_seconds(double seconds, const std::string& name) {
  return duration(seconds * 1000, seconds, name, seconds >= 0);
}

Milliseconds to_positive_seconds(double seconds, const std::string& name) {
  if (seconds == 0) throw std::invalid_argument(name + " must be above 0 seconds");
  return to_seconds(seconds, name);
}

size_t to_size(int64_t value, const std::string& name) {
  if (value < 0) {
    throw std::invalid_argument(name + " must be at least 0, not " +
                                std::to_string(value));
  }
  return static_cast<size_t>(value);
}

Security to_security(const py::kwargs& given) {
  Security security;
  for (const auto& [key, value] : given) {
    const auto name = py::cast<std::string>(key);
    if (name == "insecure") {
      security.insecure = argument<bool>(value, name, "a bool");
    } else if (name == "tls") {
      security.tls = argument<bool>(value, name, "a bool");
    } else if (value.is_none()) {
      continue;
    } else if (name == "tls_ca") {
      security.ca = read_pem(value, name);
    } else if (name == "tls_cert") {
      security.cert = read_pem(value, name);
    } else if (name == "tls_key") {
      security.key = read_pem(value, name);
    } else if (name == "tls_server_name") {
      security.server_name = argument<std::string>(value, name, "a str");
    } else if (name == "token") {
      security.token = argument<std::string>(value, name, "a str");
      if (security.token.empty()) {
        throw std::invalid_argument("token is empty; give None for no token");
      }
    } else {
      throw py::type_error("there is no argument " + name +
                           "; those for security are tls, tls_ca, tls_cert, tls_key, "
                           "tls_server_name, token and insecure");
    }
  }
  return security;
}

ExpectedEnvironment to_expected(const py::object& given) {
  ExpectedEnvironment expected;
  if (given.is_none()) return expected;
  for (const auto& [key, value] : argument<py::dict>(given, "expected", "a dict")) {
    const auto name = py::cast<std::string>(key);
    if (name == "name") {
      expected.name = py::cast<std::string>(value);
    } else if (name == "num_envs") {
      expected.num_envs = py::cast<int64_t>(value);
    } else if (name == "settings") {
      expected.settings = py::cast<decltype(expected.settings)>(value);
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
