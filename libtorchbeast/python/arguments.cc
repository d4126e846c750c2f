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
#include <system_error>

#include "bindings.h"

namespace torchbeast::python {
namespace {

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

constexpr uintmax_t kLargestPem = 1 << 20;

std::string read_pem(py::handle value, const std::string& name) {
  const auto path = argument<std::filesystem::path>(value, name, "a path");
  const std::string what = name + ": '" + path.string() + "' ";
  std::error_code ignored;  // open() says what is wrong
  if (std::filesystem::exists(path, ignored) &&
      (!std::filesystem::is_regular_file(path, ignored) ||
       std::filesystem::file_size(path, ignored) > kLargestPem)) {
    throw std::invalid_argument(what + "is not a file of at most 1 MiB");
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
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

// Throws std::invalid_argument if certificates and key can't be used; gRPC would listen
// all the same. Files are those that were given, or None.
void check_tls(const py::object& ca, const py::object& cert, const py::object& key) {
  if (ca.is_none() && cert.is_none() && key.is_none()) return;
  const py::module_ ssl = py::module_::import("ssl");  // slow
  try {
    const py::object tls = ssl.attr("SSLContext")(ssl.attr("PROTOCOL_TLS_SERVER"));
    tls.attr("set_ciphers")("DEFAULT:@SECLEVEL=0");  // weak ones are the user's choice
    if (!ca.is_none()) tls.attr("load_verify_locations")(ca);
    // With a password, so that ssl does not ask for one.
    if (!cert.is_none() && !key.is_none()) tls.attr("load_cert_chain")(cert, key, "");
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_OSError)) throw;
    throw std::invalid_argument("tls_ca, or tls_cert with tls_key: " +
                                std::string(py::str(error.value())));
  }
}

// The arguments of Security. Texts are those of files, or given as they are.
struct {
  const char* name;
  std::string Security::*text;
  bool is_file;
} constexpr kTexts[] = {{"tls_ca", &Security::ca, true},
                        {"tls_cert", &Security::cert, true},
                        {"tls_key", &Security::key, true},
                        {"tls_server_name", &Security::server_name, false},
                        {"token", &Security::token, false}};

Security to_security(const py::kwargs& given) {
  Security security;
  for (const auto& [key, value] : given) {
    const auto name = py::cast<std::string>(key);
    if (name == "tls" || name == "insecure") {
      (name == "tls" ? security.tls : security.insecure) =
          argument<bool>(value, name, "a bool");
      continue;
    }
    const auto* const found =
        std::find_if(std::begin(kTexts), std::end(kTexts),
                     [&name](const auto& known) { return name == known.name; });
    if (found == std::end(kTexts)) {
      throw py::type_error("Security has no argument " + name +
                           "; allowed are tls, tls_ca, tls_cert, tls_key, "
                           "tls_server_name, token and insecure");
    }
    if (value.is_none()) continue;
    security.*found->text = found->is_file
                                ? read_pem(value, name)
                                : argument<std::string>(value, name, "a str");
    if ((security.*found->text).empty()) {
      throw std::invalid_argument(name + " is empty; give None for no " + name);
    }
  }
  const auto file = [&given](const char* name) {
    return given.contains(name) ? py::object(given[name]) : py::none();
  };
  check_tls(file("tls_ca"), file("tls_cert"), file("tls_key"));
  return security;
}

// Shows what was given, but no secret.
std::string to_text(const Security& security) {
  std::string text;
  const auto add = [&text](bool is_given, const std::string& argument) {
    if (is_given) text += (text.empty() ? "" : ", ") + argument;
  };
  add(security.tls, "tls=True");
  for (const auto& [name, member, is_file] : kTexts) {
    const std::string& value = security.*member;
    const bool is_shown = &value == &security.server_name;
    add(!value.empty(),
        std::string(name) + "=" + (is_shown ? "'" + value + "'" : "..."));
  }
  add(security.insecure, "insecure=True");
  return "Security(" + text + ")";
}

}  // namespace

void bind_security(py::module_& m) {
  py::class_<Security>(m, "Security", R"(
How one side of a connection proves its identity, and what proof it wants of the other.
Server, Client, Listener, ActorPool and probe() take it. It can't be changed, and its repr
shows no secret. Security() is plain: enough for unix sockets of this user and for
addresses that only this machine reaches.

Args, all by name:
    tls: use TLS for host:port addresses; so does each of the next four. Files are read
        here, once.
    tls_ca: path of a PEM file: certificates that must have signed the other side's. None:
        the side that connects trusts the system's, and the side that listens wants none.
    tls_cert, tls_key: paths of PEM files: this side's certificate and its key. The side
        that listens needs them for TLS.
    tls_server_name: for the side that connects: the name in the other side's certificate,
        if it is not the host's.
    token: the side that connects shows it, and the side that listens refuses all others.
    insecure: allow, beyond this machine, plain TCP, and TLS without tls_ca and token on
        the side that listens. Also allow unix sockets of other users.

Raises:
    ValueError: a file cannot be read or used, or a text is empty.
)")
      .def(py::init(&to_security))
      .def("__repr__", [](const Security& self) { return to_text(self); });
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
