// The environments' side: Server and Client.

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "../client.h"
#include "../server.h"
#include "bindings.h"

namespace torchbeast::python {
namespace {

using namespace py::literals;

// kStopLimit, as Python's default of stop().
constexpr double kStopSeconds = kStopLimit.count() / 1000.0;

// stop(timeout_s) of both.
template <typename T>
void stop(T& self, double timeout_s) {
  const Milliseconds timeout = to_seconds(timeout_s, "timeout_s");
  WithoutGil no_gil;
  self.stop(timeout);
}

// A new T, which makes environments by env_class().
template <typename T, typename Options>
std::shared_ptr<T> make_env(const py::object& env_class, std::string name,
                            const Settings& settings, Options options) {
  const auto callback = std::make_shared<Callback>(
      env_class, "env_class must be a class or function without arguments");
  return make<T>(
      {{callback}, {}}, +[](T& self) { self.stop(); },
      environment_factory(callback, std::move(name), settings), std::move(options));
}

// Calls f(), self's run(), without the GIL. Ctrl-C ends it even while it waits for the
// learner in the main thread, see libtorchbeast_ctrl_c.py.
template <typename T, typename F>
void run_stoppable(T& self, F&& f) {
  const py::object end =
      call_half("ctrl_c", "stop_at_ctrl_c", py::cast(&self).attr("stop"));
  try {
    without_gil([&f] {
      f();
      check_signals()();
    });
  } catch (...) {
    call(end);
    throw;
  }
  call(end);
}

void bind_server(py::module_& m) {
  py::class_<EnvServer, std::shared_ptr<EnvServer>>(m, "Server", collected<EnvServer>(),
                                                    doc("Server"))
      .def(py::init([](py::object env_class, std::string server_address,
                       int max_streams, std::string name, const Settings& settings,
                       const Security& security) {
             return make_env<EnvServer>(
                 env_class, std::move(name), settings,
                 StreamServerOptions{std::move(server_address), security, max_streams});
           }),
           "env_class"_a, "server_address"_a = "unix:/tmp/polybeast", py::kw_only(),
           "max_streams"_a = 256, "name"_a = "", "settings"_a = Settings(),
           "security"_a = Security())
      .def(
          "run",
          [](EnvServer& self) {
            run_stoppable(self, [&self] {
              try {
                self.run(check_signals());
              } catch (const py::error_already_set&) {  // Ctrl-C
                self.stop();
                throw;
              }
            });
          },
          doc("Server.run"))
      .def("start", &EnvServer::start, "here"_a = false, py::call_guard<WithoutGil>(),
           doc("Server.start"))
      .def("stop", &stop<EnvServer>, "timeout_s"_a = kStopSeconds, doc("Server.stop"))
      .def_property_readonly("address", &EnvServer::address, doc("Server.address"))
      .def(
          "stats",
          [](const EnvServer& self) {
            const EnvServerStats stats = self.stats();
            return py::dict("num_streams"_a = stats.num_streams,
                            "num_steps"_a = stats.num_steps,
                            "num_refused"_a = stats.num_refused,
                            "bytes_copied"_a = stats.bytes_copied);
          },
          doc("Server.stats"));
}

void bind_client(py::module_& m) {
  py::class_<EnvClient, std::shared_ptr<EnvClient>>(m, "Client", collected<EnvClient>(),
                                                    doc("Client"))
      .def(py::init([](py::object env_class, std::string learner_address,
                       std::string name, std::optional<double> maximum_downtime_s,
                       const Settings& settings, const Security& security) {
             EnvClientOptions options;
             options.address = std::move(learner_address);
             options.security = security;
             options.maximum_downtime =
                 maximum_downtime_s
                     ? to_seconds(*maximum_downtime_s, "maximum_downtime_s")
                     : kNever;
             return make_env<EnvClient>(env_class, std::move(name), settings,
                                        std::move(options));
           }),
           "env_class"_a, "learner_address"_a, "name"_a = "", py::kw_only(),
           "maximum_downtime_s"_a = 60.0, "settings"_a = Settings(),
           "security"_a = Security())
      .def(
          "run",
          [](EnvClient& self, std::optional<int64_t> num_episodes, bool here) {
            std::optional<uint64_t> number;
            if (num_episodes) number = to_size(*num_episodes, "num_episodes");
            const auto run = here ? &EnvClient::run_here : &EnvClient::run;
            run_stoppable(self, [&] { (self.*run)(number, check_signals()); });
          },
          "num_episodes"_a = py::none(), "here"_a = false, doc("Client.run"))
      .def("stop", &stop<EnvClient>, "timeout_s"_a = kStopSeconds, doc("Client.stop"))
      .def(
          "stats",
          [](const EnvClient& self) {
            const EnvClientStats stats = self.stats();
            return py::dict(
                "connected"_a = stats.connected, "finished"_a = stats.finished,
                "num_steps"_a = stats.num_steps, "num_episodes"_a = stats.num_episodes,
                "num_reconnects"_a = stats.num_reconnects,
                "last_error"_a = to_text(stats.last_error));
          },
          doc("Client.stats"));
}

}  // namespace

void bind_environments(py::module_& m) {
  bind_server(m);
  bind_client(m);
}

}  // namespace torchbeast::python
