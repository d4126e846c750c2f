// The learner's side: ActorPool, Listener, probe.

#include <google/protobuf/util/json_util.h>
#include <pybind11/stl.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../actor_pool.h"
#include "../listener.h"
#include "../stream_spec.h"
#include "arrays.h"
#include "bindings.h"

namespace torchbeast::python {
namespace {

using namespace py::literals;

wire::EnvHello parse_hello(const py::bytes& bytes) {
  wire::EnvHello hello;
  if (!hello.ParseFromString(bytes)) {
    throw std::invalid_argument("hello is not the \"hello\" that probe() returned");
  }
  return hello;
}

// A method of Listener that takes a hello and maybe more.
template <typename... Further, typename Method>
auto with_hello(Method method) {
  return [method](Listener& self, const py::bytes& hello, const Further&... further) {
    const wire::EnvHello parsed = parse_hello(hello);
    WithoutGil no_gil;
    return (self.*method)(parsed, further...);
  };
}

// As space_from_json() of libtorchbeast_gym.py.
py::object space_to_python(const wire::Space& space) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_enums_as_ints = true;
  std::string json;
  const auto status =
      google::protobuf::util::MessageToJsonString(space, &json, options);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  return py::module_::import("libtorchbeast_gym").attr("space_from_json")(json);
}

// What probe() returns.
py::dict to_dict(const wire::EnvHello& hello) {
  py::dict fields;
  for (const wire::Field& field : hello.extra_fields()) {
    const auto shape = py::tuple(
        py::cast(std::vector<uint64_t>(field.shape().begin(), field.shape().end())));
    fields[py::str(field.name())] = py::dict(
        "dtype"_a = dtype_name(static_cast<DType>(field.dtype())), "shape"_a = shape);
  }
  py::dict settings;
  for (const wire::Setting& setting : hello.settings()) {
    settings[py::str(setting.name())] = setting.value();
  }
  return py::dict("name"_a = hello.environment(), "num_envs"_a = hello.num_envs(),
                  "observation_space"_a = space_to_python(hello.observation_space()),
                  "action_space"_a = space_to_python(hello.action_space()),
                  "extra_fields"_a = fields, "settings"_a = settings,
                  "step_bytes"_a = StreamSpec(hello).step_bytes,
                  "hello"_a = py::bytes(hello.SerializeAsString()));
}

py::dict to_dict(const ActorPoolStats& stats) {
  return py::dict(
      "num_steps"_a = stats.num_steps, "num_rollouts"_a = stats.num_rollouts,
      "num_reconnects"_a = stats.num_reconnects,
      "num_dropped_steps"_a = stats.num_dropped_steps,
      "num_connected"_a = stats.num_connected, "num_refused"_a = stats.num_refused,
      "num_env_failures"_a = stats.num_env_failures,
      "bytes_copied"_a = stats.bytes_copied, "pool_bytes"_a = stats.pool_bytes,
      "env_seconds"_a = stats.env_seconds,
      "env_wait_seconds"_a = stats.env_wait_seconds,
      "inference_wait_seconds"_a = stats.inference_wait_seconds,
      "queue_wait_seconds"_a = stats.queue_wait_seconds,
      "last_error"_a = to_text(stats.last_error));
}

py::dict to_dict(const ListenerStats& stats) {
  return py::dict("num_streams"_a = stats.num_streams,
                  "num_refused"_a = stats.num_refused,
                  "last_refusal"_a = to_text(stats.last_refusal));
}

// As RunLimits.check() of libtorchbeast_limits.py takes them.
py::dict to_dict(const PoolFacts& facts) {
  const auto in_seconds = [](Clock::time_point time) {
    return std::chrono::duration<double>(time.time_since_epoch()).count();
  };
  py::dict peers;
  for (const auto& [origin, peer] : facts.peers) {
    peers[to_text(origin)] =
        py::make_tuple(peer.is_present, peer.has_delivered, in_seconds(peer.proven_at),
                       peer.num_failures);
  }
  return py::dict(
      "time"_a = in_seconds(facts.time), "was_suspended"_a = facts.was_suspended,
      "peers"_a = peers, "last_failure"_a = to_text(facts.last_failure),
      "last_error"_a = to_text(facts.last_error), "num_servers"_a = facts.num_servers,
      "num_refusing"_a = facts.num_refusing, "listener"_a = to_text(facts.listener));
}

// Ends a run by Python's signals, and by the decision of libtorchbeast_limits.py.
std::function<void(const PoolFacts&)> make_check(double maximum_downtime_s,
                                                 int64_t max_env_failures) {
  const py::object limits =
      py::module_::import("libtorchbeast_limits")
          .attr("RunLimits")(maximum_downtime_s, max_env_failures);
  return [check = keep(limits.attr("check"))](const PoolFacts& facts) {
    WithGil gil;
    check_signals()();
    call(static_cast<PyObject*>(check.get()), py::make_tuple(to_dict(facts)));
  };
}

// Half of the memory that this process may use.
uint64_t default_rollout_bytes() {
  const auto hardware = py::module_::import("torchbeast.base.hardware");
  return hardware.attr("memory_limit")().cast<uint64_t>() / 2;
}

}  // namespace

void bind_pool(py::module_& m) {
  py::class_<ActorPool, std::shared_ptr<ActorPool>>(m, "ActorPool", R"(
Runs the environments of servers against batched inference, and makes rollouts.

Each address gets a stream of E environments. At each step the pool hands inference_batcher

    ((observation, reward, done, episode_step, episode_return), agent_state)

with leaves [1, E, ...] (reward and episode_return float32, done bool, episode_step
int64). If the environment has extra fields, a dict of these comes sixth. It expects

    ((action, ...), new_agent_state)

or a dict with the key "action" in place of the tuple, every leaf [1, E, ...]. The pool
hands the state back unchanged; if done is true, the agent begins with a new one. After
unroll_length steps (T) the pool enqueues

    ((env_outputs, agent_outputs), initial_agent_state)

into learner_queue, leaves [T+1, E, ...]. The outputs in row t are the agent's answer to
row t. Row 0 is the last row of the rollout before, and the state is the one before row 0.

With named_rows, rows are dicts. The batcher gets (row, agent_state), the agent answers
with a dict of outputs, and the queue gets (rows, initial_agent_state). A row has
observation, reward, done, episode_step, episode_return, the extra fields, and game_over,
game_step and game_return, which are the episode's unless the environment has such fields.
The queue's rows have the agent's outputs, too; of two fields with one name, the agent's.

Actions are what the policy draws: integers count from 0 whatever the action space's
start, and floats are float32. They must fit the action space of the environments. If these
have none, an action is one array of any dtype and shape, and is sent as it is.

If environments of a step were truncated, see Server, and the outputs are a dict with
"baseline" and "truncation_value" (both float32 [1, E, ...], of one shape), the pool also
asks the batcher about the final observation. Its baseline becomes the truncation_value of
that row.

Args:
    unroll_length: T, at least 1.
    learner_queue: a BatchingQueue with batch_dim 1.
    inference_batcher: a DynamicBatcher with batch_dim 1.
    env_server_addresses: one stream for each, such as "unix:/tmp/polybeast.0" or
        "host:port"; an address may occur several times. May be empty with a listener.
    initial_agent_state: nest of [layers, n, ...]; n is 1 (the same for every
        environment) or E. () for none.
    named_rows: hand out rows as dicts.
    max_rollout_bytes: of the rollouts in progress of all streams together, whose sizes the
        environments announce. A stream that would exceed it is refused. As much again may
        wait in the queue. None: half of the memory that this process may use.
    step_timeout_s: seconds that an environment may take for a step.
    maximum_downtime_s: the run ends if there is no stream at all for so long. A stream
        that is lost or refused is dialled again; its unfinished rollout is dropped and
        counted. An environment that has joined may come back within this time and goes on
        in its rollout.
    max_env_failures: environments that may raise, or break a rule after their first row,
        within a minute; each costs its stream.
        Unless this is 0, those of a single peer do not count while another one is
        connected: of an address, or of a machine from which environments join.
    hello: the "hello" that probe() returned: what all environments must be. None: the
        same as the first that connects, or with a listener its measure, see there.
    is_provisional: the listener's environments are compared with `hello` only once the
        caller has called its settle(); otherwise the first rollout settles it.
    expected: what environments must be, as the learner's flags say: a dict of name (str),
        num_envs (int) and settings (dict of str), each of which may be missing. Others
        are refused with the names of what differs.
    seed: of the run. Each stream gets it, with a number that no other stream has had, see
        Server. None: it gets neither. With a listener, the listener's seed counts.
    first_stream, stream_stride: the first stream of address i gets the number
        first_stream + i * stream_stride, later ones those that follow.
    listener: a Listener that has been started, or None. Environments that join there are
        run, too. It serves one pool at a time.
    security: a Security, for the servers.

Raises:
    ValueError: an argument is out of range, or the security is too little for an address.
)")
      .def(py::init([](int64_t unroll_length,
                       std::shared_ptr<BatchingQueue> learner_queue,
                       std::shared_ptr<DynamicBatcher> inference_batcher,
                       std::vector<std::string> env_server_addresses,
                       const py::object& initial_agent_state, bool named_rows,
                       std::optional<int64_t> max_rollout_bytes, double step_timeout_s,
                       double maximum_downtime_s, int64_t max_env_failures,
                       const std::optional<py::bytes>& hello, bool is_provisional,
                       std::shared_ptr<Listener> listener, const py::object& expected,
                       std::optional<uint64_t> seed, uint64_t first_stream,
                       uint64_t stream_stride, const Security& security) {
             ActorPoolOptions options;
             options.unroll_length = unroll_length;
             options.named_rows = named_rows;
             if (max_rollout_bytes) {
               if (*max_rollout_bytes < 1) {
                 throw std::invalid_argument(
                     "max_rollout_bytes must be at least 1, got " +
                     std::to_string(*max_rollout_bytes));
               }
               options.max_rollout_bytes = static_cast<uint64_t>(*max_rollout_bytes);
             } else {
               options.max_rollout_bytes = default_rollout_bytes();
             }
             options.addresses = std::move(env_server_addresses);
             options.listener = std::move(listener);
             options.security = security;
             options.step_timeout =
                 to_positive_seconds(step_timeout_s, "step_timeout_s");
             options.maximum_downtime =
                 to_seconds(maximum_downtime_s, "maximum_downtime_s");
             options.check = make_check(maximum_downtime_s, max_env_failures);
             if (hello) options.hello = parse_hello(*hello);
             options.is_provisional = is_provisional;
             options.expected = to_expected(expected);
             options.seed = seed;
             options.first_stream = first_stream;
             options.stream_stride = stream_stride;
             return make_with_threads<ActorPool>(
                 [](ActorPool& pool) { pool.close(); }, std::move(options),
                 std::move(learner_queue), std::move(inference_batcher),
                 nest_from_python(initial_agent_state));
           }),
           py::arg("unroll_length"), py::arg("learner_queue").none(false),
           py::arg("inference_batcher").none(false), py::arg("env_server_addresses"),
           py::arg("initial_agent_state"), py::kw_only(), py::arg("named_rows") = false,
           py::arg("max_rollout_bytes") = py::none(), py::arg("step_timeout_s") = 60.0,
           py::arg("maximum_downtime_s") = 60.0, py::arg("max_env_failures") = 10,
           py::arg("hello") = py::none(), py::arg("is_provisional") = false,
           py::arg("listener") = py::none(), py::arg("expected") = py::none(),
           py::arg("seed") = py::none(), py::arg("first_stream") = 0,
           py::arg("stream_stride") = 1, py::arg("security") = Security())
      .def("run", &ActorPool::run, py::call_guard<WithoutGil>(), R"(
Run until close() is called or the queue or the batcher is closed; without servers, also
until the listener is closed. Call it once.

Raises the first error that ends it, after it has closed the queue and the batcher:
    ValueError: the agent's outputs do not fit; says where.
    RefusedError: all servers refuse, for example the token, or their environments can't be
        served.
    TransportError: there was no stream at all for too long; with the last reason.
    RuntimeError: environments raised too often; with the last one's traceback.
    AsyncError: inference failed.
)")
      .def("close", &ActorPool::close, py::call_guard<WithoutGil>(),
           "End run(). Any thread may call it, any number of times.")
      .def("count", &ActorPool::count,
           "The number of environment steps: E for each step of a stream.")
      .def(
          "stats", [](const ActorPool& self) { return to_dict(self.stats()); }, R"(
Counters since the beginning: num_steps, num_rollouts, num_reconnects (streams that were
lost and came back), num_dropped_steps (of rollouts that were given up after a loss),
num_connected (streams now), num_refused (dialled streams), num_env_failures, bytes_copied,
pool_bytes. Summed over streams: env_seconds (what the environments needed for their
steps), env_wait_seconds, inference_wait_seconds, queue_wait_seconds. last_error says why a
stream was lost last.
)")
      .def(
          "events", [](ActorPool& self) { return to_tuple(self.events().take()); },
          R"(
What has happened to streams since the last call: a list of (seconds since 1970, kind,
text), and the number of older events that were forgotten. Kinds are "lost", "returned",
"refused", and "env_error", which means that an environment has raised. Refusals of
environments that have joined are the listener's.
)");

  m.def(
      "probe",
      [](const std::string& address, double timeout_s, const py::object& expected,
         const Security& security) {
        const Milliseconds timeout = to_positive_seconds(timeout_s, "timeout_s");
        const ExpectedEnvironment must_be = to_expected(expected);
        return to_dict(without_gil([&] {
          return ActorPool::probe(address, security, timeout, must_be, check_signals());
        }));
      },
      py::arg("address"), py::arg("timeout_s") = 10.0, py::kw_only(),
      py::arg("expected") = py::none(), py::arg("security") = Security(), R"(
Ask an environment server what it serves. It makes one environment for this and ends it.

Returns a dict:
    name: str, maybe empty
    num_envs: int, E
    observation_space: dict with "type" and, by type,
        Box            dtype (str), shape (tuple), low and high (None: unbounded; a float
                       for all elements; else a float64 array of that shape)
        Discrete       n, start (int)
        MultiDiscrete  n, start (tuples of int)
        MultiBinary    shape
        Tuple          spaces (tuple of such dicts)
        Dict           spaces (dict of such dicts)
    action_space: such a dict, of what the policy writes; None if there is none
    extra_fields: dict from name to a dict of dtype and shape, in the order of a step
    settings: dict of str, the flags that the environments were made with; maybe empty
    step_bytes: of all arrays of a step
    hello: bytes, for ActorPool and Listener.refuse()

`expected` and `security` are as of ActorPool.

Raises:
    RefusedError: the server refuses, for example the token, or is not as expected.
    TransportError: no answer within timeout_s seconds.
    WireError: the answer breaks the protocol's rules.
    RuntimeError: the environment raised; with its traceback.
)");
}

void bind_listener(py::module_& m) {
  py::class_<Listener, std::shared_ptr<Listener>>(m, "Listener", R"(
Lets environments dial the learner: those behind NAT, or those that come and go. Client is
their side. So is any program that speaks libtorchbeast/proto/torchbeast.proto.

An ActorPool that was given the listener runs them. Each has a place with an unroll. One
that is lost may come back and goes on where it was. One that has left between episodes
leaves its unroll to the next that joins.

All environments of a run must be alike. The measure is the first whose hello keeps the
rules. Until the run has settled for it, environments that differ wait, and one of them
becomes the measure once no stream is left that is like the old one. From then on, those
that differ are refused.

Args:
    address: "unix:/path" or "host:port"; port 0: a free one, see `address`.
    max_streams: places. If all are taken, further ones are told to try again later.
    expected, seed: as of ActorPool. Streams get numbers in the order in which they come.
    hello_timeout_s: seconds that an environment may take for its hello, which may need its
        first reset.
    security: a Security.

Raises:
    ValueError: an argument is out of range, or the security is too little for the address.
)")
      .def(py::init([](std::string address, int max_streams, const py::object& expected,
                       std::optional<uint64_t> seed, double hello_timeout_s,
                       const Security& security) {
             ListenerOptions options;
             options.expected = to_expected(expected);
             options.seed = seed;
             options.hello_timeout =
                 to_positive_seconds(hello_timeout_s, "hello_timeout_s");
             options.address = std::move(address);
             options.security = security;
             options.max_streams = max_streams;
             return make_with_threads<Listener>(
                 [](Listener& listener) { listener.close(); }, std::move(options));
           }),
           py::arg("address"), py::kw_only(), py::arg("max_streams") = 256,
           py::arg("expected") = py::none(), py::arg("seed") = py::none(),
           py::arg("hello_timeout_s") = 60.0, py::arg("security") = Security())
      .def("start", &Listener::start, py::call_guard<WithoutGil>(), R"(
Listen from here on, without blocking. Environments that join wait for a pool.

Raises:
    RuntimeError: it cannot listen there; says why.
)")
      .def("close", &Listener::close, py::call_guard<WithoutGil>(),
           "End all streams and remove the unix socket. Any thread may call it, any "
           "number of times.")
      .def("finish", &Listener::finish, py::call_guard<WithoutGil>(), R"(
The run is complete: Client.run() returns in all environments, also in those that join until
close(). Call it before ActorPool.close(). Without it they dial again.
)")
      .def(
          "probe",
          [](Listener& self, double timeout_s) {
            const Milliseconds timeout = to_positive_seconds(timeout_s, "timeout_s");
            return to_dict(
                without_gil([&] { return self.probe(timeout, check_signals()); }));
          },
          py::arg("timeout_s") = 60.0, R"(
Wait until an environment has joined whose hello keeps the rules, and return the measure, as
probe() does.

Raises:
    TransportError: none within timeout_s seconds.
)")
      .def("refuse", with_hello<std::string>(&Listener::refuse), py::arg("hello"),
           py::arg("reason"), R"(
Refuse environments with this "hello", which probe() returned, for this reason. probe()
then waits for another.
)")
      .def("settle", with_hello(&Listener::settle), py::arg("hello"),
           "This hello stays the measure, because the run has learned from it.")
      .def("wants_other", with_hello(&Listener::wants_other), py::arg("hello"),
           "Whether the measure has become another than this hello.")
      .def("pass_over", &Listener::pass_over, py::call_guard<WithoutGil>(), R"(
Make an environment the measure that waits because it differs, if there is one and the run
has not settled.
)")
      .def(
          "events", [](Listener& self) { return to_tuple(self.events().take()); },
          "As ActorPool.events(): who was refused, and which raised before the hello.")
      .def_property_readonly("address", &Listener::address,
                             "Where it listens, with the port that it has found.")
      .def(
          "stats",
          [](const Listener& self) {
            return to_dict(without_gil([&] { return self.stats(); }));
          },
          R"(
num_streams (now), num_refused (since the beginning), last_refusal (why; maybe empty).
)");
}

}  // namespace torchbeast::python
