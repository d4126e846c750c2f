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

// What probe() returns.
py::dict to_dict(const wire::EnvHello& hello) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_enums_as_ints = true;
  std::string json;
  const auto status =
      google::protobuf::util::MessageToJsonString(hello, &json, options);
  if (!status.ok()) throw std::runtime_error(status.ToString());
  py::dict described = call_half("gym", "hello_from_json", json);
  described["step_bytes"] = StreamSpec(hello).step_bytes;
  described["hello"] = py::bytes(hello.SerializeAsString());
  return described;
}

py::dict to_dict(const ActorPoolStats& stats) {
  return py::dict(
      "num_steps"_a = stats.num_steps, "num_rollouts"_a = stats.num_rollouts,
      "num_reconnects"_a = stats.num_reconnects,
      "num_dropped_steps"_a = stats.num_dropped_steps,
      "num_connected"_a = stats.num_connected, "num_refused"_a = stats.num_refused,
      "num_different"_a = stats.num_different,
      "num_env_failures"_a = stats.num_env_failures,
      "bytes_copied"_a = stats.bytes_copied, "pool_bytes"_a = stats.pool_bytes,
      "env_seconds"_a = stats.env_seconds,
      "env_wait_seconds"_a = stats.env_wait_seconds,
      "inference_wait_seconds"_a = stats.inference_wait_seconds,
      "queue_wait_seconds"_a = stats.queue_wait_seconds,
      "last_error"_a = to_text(stats.last_error));
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
      call_half("limits", "RunLimits", maximum_downtime_s, max_env_failures);
  return [check = keep(limits.attr("check"))](const PoolFacts& facts) {
    WithGil gil;
    check_signals()();
    call(static_cast<PyObject*>(check.get()), py::make_tuple(to_dict(facts)));
  };
}

}  // namespace

void bind_pool(py::module_& m) {
  py::class_<ActorPool, std::shared_ptr<ActorPool>>(
      m, "ActorPool", collected<ActorPool>(), doc("ActorPool"))
      .def(py::init([](int64_t unroll_length,
                       std::shared_ptr<BatchingQueue> learner_queue,
                       std::shared_ptr<DynamicBatcher> inference_batcher,
                       std::vector<std::string> env_server_addresses,
                       const py::object& initial_agent_state, bool named_rows,
                       std::optional<int64_t> max_rollout_bytes, double step_timeout_s,
                       double maximum_downtime_s, int64_t max_env_failures,
                       const std::optional<py::bytes>& hello,
                       std::shared_ptr<Listener> listener, const py::object& expected,
                       std::optional<uint64_t> seed, uint64_t first_stream,
                       uint64_t stream_stride, const Security& security) {
             ActorPoolOptions options;
             options.unroll_length = unroll_length;
             options.named_rows = named_rows;
             options.max_rollout_bytes =
                 max_rollout_bytes
                     ? to_size(*max_rollout_bytes, "max_rollout_bytes", 1)
                     : call_half("arguments", "default_rollout_bytes").cast<size_t>();
             options.addresses = std::move(env_server_addresses);
             options.listener = std::move(listener);
             options.security = security;
             options.step_timeout =
                 to_positive_seconds(step_timeout_s, "step_timeout_s");
             options.maximum_downtime =
                 to_seconds(maximum_downtime_s, "maximum_downtime_s");
             options.check = make_check(maximum_downtime_s, max_env_failures);
             if (hello) options.hello = parse_hello(*hello);
             options.expected = to_expected(expected);
             options.seed = seed;
             options.first_stream = first_stream;
             options.stream_stride = stream_stride;
             References references;
             const auto hold = [&references](auto& queue) {
               py::object object = py::cast(queue);
               references.objects.push_back(object.ptr());
               queue = {keep(std::move(object)), queue.get()};
             };
             hold(learner_queue);
             hold(inference_batcher);
             return make<ActorPool>(
                 std::move(references), +[](ActorPool& pool) { pool.close(); },
                 std::move(options), std::move(learner_queue),
                 std::move(inference_batcher), nest_from_python(initial_agent_state));
           }),
           "unroll_length"_a, py::arg("learner_queue").none(false),
           py::arg("inference_batcher").none(false), "env_server_addresses"_a,
           "initial_agent_state"_a, py::kw_only(), "named_rows"_a = false,
           "max_rollout_bytes"_a = py::none(), "step_timeout_s"_a = 60.0,
           "maximum_downtime_s"_a = 60.0, "max_env_failures"_a = 10,
           "hello"_a = py::none(), "listener"_a = py::none(), "expected"_a = py::none(),
           "seed"_a = py::none(), "first_stream"_a = 0, "stream_stride"_a = 1,
           "security"_a = Security())
      .def("run", &ActorPool::run, py::call_guard<WithoutGil>(), doc("ActorPool.run"))
      .def("close", &ActorPool::close, py::call_guard<WithoutGil>(),
           doc("ActorPool.close"))
      .def("settle", &ActorPool::settle, doc("ActorPool.settle"))
      .def("count", &ActorPool::count, doc("ActorPool.count"))
      .def(
          "stats", [](const ActorPool& self) { return to_dict(self.stats()); },
          doc("ActorPool.stats"))
      .def(
          "events", [](ActorPool& self) { return to_tuple(self.events().take()); },
          doc("ActorPool.events"));

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
      "address"_a, "timeout_s"_a = 10.0, py::kw_only(), "expected"_a = py::none(),
      "security"_a = Security(), doc("probe"));
}

void bind_listener(py::module_& m) {
  py::class_<Listener, std::shared_ptr<Listener>>(m, "Listener", doc("Listener"))
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
             return make<Listener>(
                 {}, +[](Listener& listener) { listener.close(); }, std::move(options));
           }),
           "address"_a, py::kw_only(), "max_streams"_a = 256, "expected"_a = py::none(),
           "seed"_a = py::none(), "hello_timeout_s"_a = 60.0, "security"_a = Security())
      .def("start", &Listener::start, py::call_guard<WithoutGil>(),
           doc("Listener.start"))
      .def("close", &Listener::close, py::call_guard<WithoutGil>(),
           doc("Listener.close"))
      .def("finish", &Listener::finish, py::call_guard<WithoutGil>(),
           doc("Listener.finish"))
      .def(
          "probe",
          [](Listener& self, double timeout_s,
             const std::optional<py::bytes>& other_than) {
            const Milliseconds timeout = to_positive_seconds(timeout_s, "timeout_s");
            std::optional<wire::EnvHello> avoided;
            if (other_than) avoided = parse_hello(*other_than);
            return to_dict(without_gil(
                [&] { return self.probe(timeout, check_signals(), avoided); }));
          },
          "timeout_s"_a = 60.0, py::kw_only(), "other_than"_a = py::none(),
          doc("Listener.probe"))
      .def(
          "refuse",
          [](Listener& self, const py::bytes& hello, const std::string& reason) {
            const wire::EnvHello parsed = parse_hello(hello);
            without_gil([&] { self.refuse(parsed, reason); });
          },
          "hello"_a, "reason"_a, doc("Listener.refuse"))
      .def(
          "events", [](Listener& self) { return to_tuple(self.events().take()); },
          doc("Listener.events"))
      .def_property_readonly("address", &Listener::address, doc("Listener.address"))
      .def(
          "stats",
          [](const Listener& self) {
            const auto stats = without_gil([&] { return self.stats(); });
            return py::dict("num_streams"_a = stats.num_streams,
                            "num_refused"_a = stats.num_refused,
                            "last_refusal"_a = to_text(stats.last_refusal));
          },
          doc("Listener.stats"));
}

}  // namespace torchbeast::python
