// The environments' side: Server and Client.

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "../client.h"
#include "../server.h"
#include "bindings.h"
#include "python_environment.h"

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

void bind_server(py::module_& m) {
  py::class_<EnvServer, std::shared_ptr<EnvServer>>(m, "Server", R"(
Serves environments: each stream has one of its own, made by env_class().

env_class() gives one of two.

A single environment, E = 1, with reset() and step(action) of the old Gym (observation; 4
values) or of Gymnasium (observation, info; 5 values). Its observation may be any nest of
arrays and numbers. The learner gets the attributes observation_space and action_space (of
gymnasium or gym: Box, Discrete, MultiDiscrete, MultiBinary, Tuple, Dict). Without an
observation_space, the first observation shows dtypes and shapes. Without an action_space,
step() gets the agent's array as it is, of one environment.
The step that ends an episode also resets the environment. Its row holds the first
observation of the next episode, the reward of the last step, and length and return of the
episode that has ended. Truncated episodes end as terminated ones do, and there are no
extra fields. step() gets an int for a Discrete action, else a NumPy array of the space's
dtype, nested as the space is. A Discrete's start is added, and floats are clipped into
their bounds.

E environments in lockstep, which reset themselves: an object with num_envs,
observation_space and action_space (of a single environment), and the methods initial()
and step(actions). These return a row: a dict of "observation" (nested), "reward", "done",
"episode_step", "episode_return" and any other fields, every array [E, ...]. The others
become extra fields of the pool, in the order of their names. If there is a field
"truncated" (bool [E]), the attribute final_observation (None or nested [E, ...]) holds the
last observations of truncated episodes. step() gets what the policy wrote, [E, ...],
nested as the action space is. torchbeast.envs.environment.Environment is such an object.
The arrays of a row must keep their contents until the next call.

Both may have a method begin_stream(seed, stream), which is called before the first reset()
or initial(): seed is the run's, and stream the number of this stream, which no other
stream of the run has had. A single environment without this method gets a seed made from
both, if its reset() takes one or if it has the seed() of the old Gym. There is no call if
the learner does not send these numbers, or only asks what is served.

If there is a method close(), it is called when the stream ends. An exception in any of
these travels to the learner as text, with its traceback.

Args:
    env_class: called without arguments, in a thread of the stream's own.
    server_address: "unix:/path" or "host:port"; port 0: a free one, see `address`.
    max_streams: at once; more are refused.
    name: of the environment, as probe() shows it, such as the --env of a run.
    settings: dict of str, the flags that the environments are made with. A learner that
        has others refuses them.
    security: a Security.

Raises:
    ValueError: an argument is out of range, or the security is too little for the address.
)")
      .def(py::init([](py::object env_class, std::string server_address,
                       int max_streams, std::string name, const Settings& settings,
                       const Security& security) {
             StreamServerOptions options;
             options.address = std::move(server_address);
             options.security = security;
             options.max_streams = max_streams;
             return make_with_threads<EnvServer>(
                 [](EnvServer& server) { server.stop(); },
                 environment_factory(std::move(env_class), std::move(name), settings),
                 std::move(options));
           }),
           py::arg("env_class"), py::arg("server_address") = "unix:/tmp/polybeast",
           py::kw_only(), py::arg("max_streams") = 256, py::arg("name") = "",
           py::arg("settings") = Settings(), py::arg("security") = Security())
      .def(
          "run",
          [](EnvServer& self) {
            try {
              self.run(check_signals());
            } catch (const py::error_already_set&) {  // Ctrl-C
              self.stop();
              throw;
            }
          },
          py::call_guard<WithoutGil>(), R"(
Serve until stop() is called; start() first, if that has not been done. Ctrl-C stops, too.

Raises:
    RuntimeError: as start().
)")
      .def("start", &EnvServer::start, py::arg("here") = false,
           py::call_guard<WithoutGil>(), R"(
Listen from here on, without blocking. A unix socket is the user's alone; one that a dead
server has left is replaced.

Args:
    here: make, step and close the environments of one stream at a time in the thread that
        calls run(), for environments that work in the main thread only. Streams that come
        meanwhile have threads of their own. Handlers of signals run when Python code does,
        so stop() has to be called in another thread. While an environment hangs, run()
        does not return.

Raises:
    RuntimeError: it cannot listen there; says why.
)")
      .def("stop", &stop<EnvServer>, py::arg("timeout_s") = kStopSeconds, R"(
End all streams, wait for their environments to be closed, and remove the unix socket.
Environments that have not returned timeout_s seconds after the first call are left behind,
and a line on stderr names them. Any thread may call it, any number of times. If an
environment calls it, that one is not waited for.
)")
      .def_property_readonly("address", &EnvServer::address,
                             "Where it listens, with the port that it has found.")
      .def(
          "stats",
          [](const EnvServer& self) {
            const EnvServerStats stats = self.stats();
            return py::dict("num_streams"_a = stats.num_streams,
                            "num_steps"_a = stats.num_steps,
                            "num_refused"_a = stats.num_refused,
                            "bytes_copied"_a = stats.bytes_copied);
          },
          R"(
num_streams (now), and counters since the beginning: num_steps (E for each), num_refused,
bytes_copied.
)");
}

void bind_client(py::module_& m) {
  py::class_<EnvClient, std::shared_ptr<EnvClient>>(m, "Client", R"(
Dials the learner, which listens, and runs one environment (of E) there.

Args:
    env_class: called once, without arguments; gives an environment as Server describes.
    learner_address: "unix:/path" or "host:port" of a Listener.
    name, settings, security: as of Server.
    maximum_downtime_s: seconds that there may be no learner, also at first. None or inf:
        for ever. Waiting for an action does not count.

Raises:
    ValueError: an argument is out of range, or the security is too little for the address.
)")
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
             return make_with_threads<EnvClient>(
                 [](EnvClient& client) { client.stop(); },
                 environment_factory(std::move(env_class), std::move(name), settings),
                 std::move(options));
           }),
           py::arg("env_class"), py::arg("learner_address"), py::arg("name") = "",
           py::kw_only(), py::arg("maximum_downtime_s") = 60.0,
           py::arg("settings") = Settings(), py::arg("security") = Security())
      .def(
          "run",
          [](EnvClient& self, std::optional<int64_t> num_episodes, bool here) {
            std::optional<uint64_t> number;
            if (num_episodes) number = to_size(*num_episodes, "num_episodes");
            WithoutGil no_gil;
            here ? self.run_here(number, check_signals())
                 : self.run(number, check_signals());
          },
          py::arg("num_episodes") = py::none(), py::arg("here") = false, R"(
Make the environment, dial, reset it once the learner has answered, and step as the learner
says, until stop() is called, Ctrl-C comes or the learner has completed its run, see
stats(). With num_episodes: until the episodes of all E
have ended together so many times, and leave then. A lost connection is dialled again, and
the environment goes on where it was. Call it once. `here`: the environment lives in this
thread, see Server.start; Ctrl-C acts while it works or has no learner.

Raises:
    RefusedError: the learner refuses, for example the token.
    TransportError: no learner for too long.
    RuntimeError: the environment raised; with its traceback. The learner gets it, too.
)")
      .def("stop", &stop<EnvClient>, py::arg("timeout_s") = kStopSeconds, R"(
End run() after the step in progress, without waiting. An environment that has not returned
timeout_s seconds after the first call is left behind: run() returns, and a line on stderr
says where it hangs. Any thread may call it, any number of times.
)")
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
          R"(
connected (now), finished (whether the learner has completed its run), and counters since
the beginning: num_steps (E for each), num_episodes
(steps in which those of all E have ended), num_reconnects. last_error says why
there was no learner last.
)");
}

}  // namespace

void bind_environments(py::module_& m) {
  bind_server(m);
  bind_client(m);
}

}  // namespace torchbeast::python
