// The Python module `libtorchbeast`.

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../actor_pool.h"
#include "../batching.h"
#include "../client.h"
#include "../listener.h"
#include "../server.h"
#include "arrays.h"
#include "gil.h"
#include "python_environment.h"
#include "spaces.h"

namespace torchbeast::python {
namespace {

using Path = std::optional<std::filesystem::path>;
using Expected = std::optional<py::dict>;

// --- Arguments -----------------------------------------------------------------------

// All durations come in here, in milliseconds. Infinity is kNever.
Milliseconds duration(double value, const std::string& given) {
  if (!(value >= 0)) {  // also if it is NaN
    throw std::invalid_argument(given +
                                ": a duration must be at least 0; inf means no "
                                "limit");
  }
  const double longest = kNever.count();
  return Milliseconds(static_cast<int64_t>(std::round(std::min(value, longest))));
}

std::string given(const std::string& name, double value) {
  return name + "=" + std::string(py::str(py::float_(value)));
}

Milliseconds to_seconds(double value, const std::string& name) {
  return duration(value * 1000, given(name, value));
}

Milliseconds to_positive_seconds(double value, const std::string& name) {
  if (value == 0) {
    throw std::invalid_argument(given(name, value) + ": it must be above 0");
  }
  return std::max(to_seconds(value, name), Milliseconds(1));
}

size_t to_size(int64_t value, const std::string& name) {
  if (value < 0) {
    throw std::invalid_argument(name + " must not be negative, which " +
                                std::to_string(value) + " is");
  }
  return static_cast<size_t>(value);
}

std::string read_pem(const Path& path, const std::string& name) {
  if (!path) return "";
  const std::string what = name + ": '" + path->string() + "' ";
  errno = std::filesystem::is_directory(*path) ? EISDIR : 0;
  std::ifstream file;
  if (errno == 0) file.open(*path, std::ios::binary);
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

Security to_security(const Path& tls_ca, const Path& tls_cert, const Path& tls_key,
                     const std::optional<std::string>& tls_server_name,
                     const std::optional<std::string>& token, bool insecure) {
  Security security;
  security.ca = read_pem(tls_ca, "tls_ca");
  security.cert = read_pem(tls_cert, "tls_cert");
  security.key = read_pem(tls_key, "tls_key");
  security.server_name = tls_server_name.value_or("");
  if (token) {
    // It travels in a header.
    for (const char c : *token) {
      if (c <= ' ' || c > '~') {
        throw std::invalid_argument("token must be of printable ASCII without spaces");
      }
    }
    if (token->empty())
      throw std::invalid_argument("token is empty; give None for no token");
  }
  security.token = token.value_or("");
  security.insecure = insecure;
  return security;
}

// From a dict of name, num_envs and settings, each of which may be missing.
ExpectedEnvironment to_expected(const std::optional<py::dict>& given) {
  ExpectedEnvironment expected;
  if (!given) return expected;
  for (const auto& [key, value] : *given) {
    const auto name = py::cast<std::string>(key);
    if (name == "name") {
      expected.name = py::cast<std::string>(value);
    } else if (name == "num_envs") {
      expected.num_envs = py::cast<int64_t>(value);
    } else if (name == "settings") {
      expected.settings = py::cast<Settings>(value);
    } else {
      throw std::invalid_argument("expected has name, num_envs and settings, but no " +
                                  name);
    }
  }
  return expected;
}

BatchingOptions to_options(int64_t batch_dim, int64_t minimum_batch_size,
                           int64_t maximum_batch_size, std::optional<double> timeout_ms,
                           bool check, std::optional<int64_t> maximum_queue_size,
                           const py::object& allocator) {
  load_numpy();
  BatchingOptions options;
  options.batch_dim = to_size(batch_dim, "batch_dim");
  options.minimum_batch_size = minimum_batch_size;
  options.maximum_batch_size = maximum_batch_size;
  if (timeout_ms)
    options.timeout = duration(*timeout_ms, given("timeout_ms", *timeout_ms));
  if (maximum_queue_size) {
    options.maximum_queue_size = to_size(*maximum_queue_size, "maximum_queue_size");
  }
  options.check = check;
  if (!allocator.is_none()) options.allocator = allocator_from_python(allocator);
  return options;
}

// --- Results -------------------------------------------------------------------------

// Text that a peer may have made up. Bytes that are not UTF-8 become \\x and their
// hexadecimal digits.
py::object to_text(const std::string& text) {
  return py::bytes(text).attr("decode")("utf-8", "backslashreplace");
}

py::dict to_dict(const BatchingStats& stats) {
  py::dict result;
  result["num_batches"] = stats.num_batches;
  result["num_items"] = stats.num_items;
  result["num_entries"] = stats.num_entries;
  result["bytes_copied"] = stats.bytes_copied;
  result["pool_bytes"] = stats.pool_bytes;
  result["consumer_wait_seconds"] = stats.consumer_wait_seconds;
  result["producer_wait_seconds"] = stats.producer_wait_seconds;
  return result;
}

py::dict to_dict(const ActorPoolStats& stats) {
  py::dict result;
  result["num_steps"] = stats.num_steps;
  result["num_rollouts"] = stats.num_rollouts;
  result["num_reconnects"] = stats.num_reconnects;
  result["num_dropped_steps"] = stats.num_dropped_steps;
  result["num_connected"] = stats.num_connected;
  result["num_refused"] = stats.num_refused;
  result["num_env_failures"] = stats.num_env_failures;
  result["bytes_received"] = stats.bytes_received;
  result["bytes_copied"] = stats.bytes_copied;
  result["pool_bytes"] = stats.pool_bytes;
  result["env_seconds"] = stats.env_seconds;
  result["env_wait_seconds"] = stats.env_wait_seconds;
  result["inference_wait_seconds"] = stats.inference_wait_seconds;
  result["queue_wait_seconds"] = stats.queue_wait_seconds;
  result["last_error"] = to_text(stats.last_error);
  return result;
}

// See ActorPool.events.
py::tuple to_tuple(const std::pair<std::vector<Event>, uint64_t>& taken) {
  const char* const kinds[] = {"lost", "returned", "refused", "env_error"};
  py::list events;
  for (const Event& event : taken.first) {
    events.append(py::make_tuple(event.time, kinds[event.kind], to_text(event.text)));
  }
  return py::make_tuple(events, taken.second);
}

py::dict to_dict(const ListenerStats& stats) {
  py::dict result;
  result["num_streams"] = stats.num_streams;
  result["num_refused"] = stats.num_refused;
  result["last_refusal"] = to_text(stats.last_refusal);
  return result;
}

py::dict to_dict(const EnvClientStats& stats) {
  py::dict result;
  result["connected"] = stats.connected;
  result["num_steps"] = stats.num_steps;
  result["num_episodes"] = stats.num_episodes;
  result["num_reconnects"] = stats.num_reconnects;
  result["bytes_sent"] = stats.bytes_sent;
  result["last_error"] = to_text(stats.last_error);
  return result;
}

py::dict to_dict(const EnvServerStats& stats) {
  py::dict result;
  result["num_streams"] = stats.num_streams;
  result["num_steps"] = stats.num_steps;
  result["num_refused"] = stats.num_refused;
  result["bytes_sent"] = stats.bytes_sent;
  result["bytes_copied"] = stats.bytes_copied;
  return result;
}

py::dict to_dict(const wire::EnvHello& hello) {
  py::dict fields;
  for (const wire::Field& field : hello.extra_fields()) {
    py::tuple shape(field.shape_size());
    for (int i = 0; i < field.shape_size(); ++i) {
      shape[static_cast<size_t>(i)] = field.shape(i);
    }
    py::dict description;
    description["dtype"] = dtype_name(static_cast<DType>(field.dtype()));
    description["shape"] = shape;
    fields[py::str(field.name())] = description;
  }
  py::dict settings;
  for (const wire::Setting& setting : hello.settings()) {
    settings[py::str(setting.name())] = setting.value();
  }
  py::dict result;
  result["name"] = hello.environment();
  result["num_envs"] = hello.num_envs();
  result["observation_space"] = space_to_python(hello.observation_space());
  result["action_space"] =
      hello.has_action_space() ? space_to_python(hello.action_space()) : py::none();
  result["extra_fields"] = fields;
  result["settings"] = settings;
  size_t step_bytes = 0;
  for (const ArraySpec& spec : StreamSpec(hello).arrays) step_bytes += spec.num_bytes();
  result["step_bytes"] = step_bytes;
  result["hello"] = py::bytes(hello.SerializeAsString());
  return result;
}

// --- Objects that wait for their threads when they end
// --------------------------------

// An ActorPool, EnvServer, ...: it ends without the GIL, before the interpreter does,
// and not in a fork of the process, where its threads are not.
template <typename T>
class Ending {
 public:
  Ending(std::shared_ptr<T> object, void (*end)(T&)) : object_(std::move(object)) {
    T* const pointer = object_.get();
    at_exit(object_, [pointer, end] { end(*pointer); });
  }
  ~Ending() {
    if (getpid() != process_) {
      // Never destroyed: the reference to itself keeps it.
      static_cast<void>(std::make_unique<std::shared_ptr<T>>(object_).release());
      return;
    }
    WithoutGil no_gil;
    object_.reset();
  }
  Ending(const Ending&) = delete;

  T* operator->() const { return object_.get(); }
  const std::shared_ptr<T>& share() const { return object_; }

 private:
  std::shared_ptr<T> object_;
  const pid_t process_ = getpid();
};

using Pool = Ending<ActorPool>;
using Server = Ending<EnvServer>;
using JoinListener = Ending<Listener>;
using Client = Ending<EnvClient>;
using Batch = DynamicBatcher::Batch;

// --- Exceptions ----------------------------------------------------------------------

// A class of Python's of this name, which lives as long as the process.
PyObject* new_error(py::module_& m, const char* name, PyObject* base, const char* doc) {
  const std::string full_name = std::string("libtorchbeast.") + name;
  PyObject* const error =
      PyErr_NewExceptionWithDoc(full_name.c_str(), doc, base, nullptr);
  if (error == nullptr) throw py::error_already_set();
  m.add_object(name, error);
  return error;
}

// What the core throws as what Python raises. A text may hold what a peer has sent.
void bind_errors(py::module_& m) {
  static PyObject* const closed = new_error(
      m, "ClosedBatchingQueue", PyExc_RuntimeError, "The queue or batcher was closed.");
  static PyObject* const async =
      new_error(m, "AsyncError", PyExc_RuntimeError,
                "The batch that a computation was part of has no answer.");
  static PyObject* const transport =
      new_error(m, "TransportError", PyExc_RuntimeError,
                "A connection could not be made, was lost or refused.");
  static PyObject* const refused =
      new_error(m, "RefusedError", transport,
                "The other side says no: a wrong token, another version, ...");
  static PyObject* const broken = new_error(
      m, "WireError", PyExc_RuntimeError, "The other side broke the protocol's rules.");
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](PyObject* type, const std::exception& error) {
      PyErr_SetObject(type, to_text(error.what()).ptr());
    };
    try {
      std::rethrow_exception(pointer);
    } catch (const py::builtin_exception&) {
      throw;
    } catch (const ClosedBatchingQueue& error) {
      raise(closed, error);
    } catch (const AsyncError& error) {
      raise(async, error);
    } catch (const RefusedError& error) {
      raise(refused, error);
    } catch (const TransportError& error) {
      raise(transport, error);
    } catch (const WireError& error) {
      raise(broken, error);
    } catch (const std::invalid_argument& error) {
      raise(PyExc_ValueError, error);
    } catch (const std::runtime_error& error) {
      raise(PyExc_RuntimeError, error);
    }
  });
}

void bind_queue(py::module_& m) {
  py::class_<BatchingQueue, std::shared_ptr<BatchingQueue>>(m, "BatchingQueue", R"(
A queue whose items come out joined along a dimension.

Items are nests (tuples, lists, dicts) of torch tensors or NumPy arrays; all items have
the same structure, dtypes, and sizes but for `batch_dim`. Iterating yields nests of
tuples and dicts whose leaves are the items' leaves joined along batch_dim: torch tensors
where torch is imported, else NumPy arrays. Any number of threads may enqueue and iterate.

C-contiguous, writable arrays that go in are not copied until their batch is made, and
must not be written to before. A batch of a single item is that item itself, without a
copy, unless there is an allocator. The memory of batches is used again when the arrays
that came out are gone.

Args:
    batch_dim: the dimension along which items are joined.
    minimum_batch_size: entries along batch_dim from which on a batch is complete. An
        item has one or more.
    maximum_batch_size: entries that a batch never exceeds.
    timeout_ms: how long an incomplete batch waits for more, in milliseconds; None: for
        ever.
    check_inputs: find faulty items in enqueue(), not only when a batch is made.
    maximum_queue_size: items that may wait before enqueue() blocks; None: any number.
    allocator: function of a number of bytes that returns writable memory of at least
        that size (a torch tensor, for example of pinned memory, or whatever has the
        buffer protocol), in which batches are made.

Raises:
    ValueError: a size that makes no sense.
)")
      .def(py::init([](int64_t batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size, std::optional<double> timeout_ms,
                       bool check_inputs, std::optional<int64_t> maximum_queue_size,
                       const py::object& allocator) {
             return std::make_shared<BatchingQueue>(
                 to_options(batch_dim, minimum_batch_size, maximum_batch_size,
                            timeout_ms, check_inputs, maximum_queue_size, allocator));
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(),
           py::arg("check_inputs") = true, py::arg("maximum_queue_size") = py::none(),
           py::arg("allocator") = py::none())
      .def(
          "enqueue",
          [](BatchingQueue& self, const py::object& nest) {
            ArrayNest item = nest_from_python(nest);
            WithoutGil no_gil;
            self.enqueue(std::move(item), check_signals());
          },
          py::arg("nest"), R"(
Add an item; block while the queue is full.

Raises:
    ValueError: an empty nest, a leaf with too few dimensions, leaves whose sizes along
        batch_dim differ, an item that does not fit to those waiting, or a leaf that
        cannot be shared, such as a CUDA tensor. Names the place in the nest.
    TypeError: a leaf that is neither a torch tensor nor a NumPy array.
    ClosedBatchingQueue: the queue was closed before there was room.
)")
      .def("size", &BatchingQueue::size, "The number of items that wait.")
      .def(
          "close",
          [](BatchingQueue& self) {
            WithoutGil no_gil;
            if (!self.close()) throw std::runtime_error("the queue was closed already");
          },
          R"(
End all waiting enqueue() calls and all iterations, and drop the items that wait.

Raises:
    RuntimeError: it was closed already.
)")
      .def("is_closed", &BatchingQueue::is_closed)
      .def(
          "stats", [](const BatchingQueue& self) { return to_dict(self.stats()); }, R"(
Counters since the beginning: num_batches, num_items and num_entries (along batch_dim) in
them, bytes_copied, pool_bytes (memory held for batches), consumer_wait_seconds and
producer_wait_seconds (summed over threads).
)")
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", [](BatchingQueue& self) {
        std::optional<ArrayNest> batch;
        {
          WithoutGil no_gil;
          batch = self.dequeue(check_signals());
        }
        if (!batch) throw py::stop_iteration();
        return nest_to_python(*batch);
      });
}

void bind_batcher(py::module_& m) {
  py::class_<Batch, std::shared_ptr<Batch>>(m, "Batch", R"(
Inputs of several callers of DynamicBatcher.compute, joined. Comes from iterating over the
batcher and must be answered, by set_outputs() or set_error(). If it is dropped unanswered
its callers get AsyncError. len() is the number of entries along batch_dim.
)")
      .def(
          "get_inputs", [](const Batch& self) { return nest_to_python(self.inputs()); },
          R"(
The inputs, joined along batch_dim; a nest as in BatchingQueue. They must not be written
to: where the batch has a single caller, it is the caller's memory.
)")
      .def(
          "set_outputs",
          [](Batch& self, const py::object& nest) {
            const ArrayNest outputs = nest_from_python(nest);
            WithoutGil no_gil;
            self.set_outputs(outputs);
          },
          py::arg("outputs"), R"(
Answer: every caller gets its entries along batch_dim of every leaf, copied.

Raises:
    ValueError: a leaf that has not len(batch) entries along batch_dim, an empty nest, or
        a leaf that cannot be shared. The batch can still be answered.
    RuntimeError: the batch was answered before.
)")
      .def(
          "set_error",
          [](Batch& self, const std::string& text) {
            WithoutGil no_gil;
            self.set_error(text);
          },
          py::arg("text"), R"(
Answer with an error: every caller gets AsyncError with this text.

Raises:
    RuntimeError: the batch was answered before.
)")
      .def("__len__", [](const Batch& self) { return self.size(); });

  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>>(m, "DynamicBatcher", R"(
Joins the inputs of many threads into batches, and hands each its part of the answer.

    for batch in batcher:
        batch.set_outputs(model(batch.get_inputs()))

Args:
    check_outputs: refuse outputs with more entries than the batch; too few always are.
    The others as in BatchingQueue, timeout_ms being 100 by default.

Raises:
    ValueError: a size that makes no sense.
)")
      .def(py::init([](int64_t batch_dim, int64_t minimum_batch_size,
                       int64_t maximum_batch_size, std::optional<double> timeout_ms,
                       bool check_outputs, const py::object& allocator) {
             return std::make_shared<DynamicBatcher>(
                 to_options(batch_dim, minimum_batch_size, maximum_batch_size,
                            timeout_ms, check_outputs, std::nullopt, allocator));
           }),
           py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100,
           py::arg("check_outputs") = true, py::arg("allocator") = py::none())
      .def(
          "compute",
          [](DynamicBatcher& self, const py::object& nest) {
            ArrayNest inputs = nest_from_python(nest);
            ArrayNest outputs;
            {
              WithoutGil no_gil;
              outputs = self.compute(std::move(inputs), check_signals());
            }
            return nest_to_python(outputs);
          },
          py::arg("inputs"), R"(
Block until a consumer has answered, and return this caller's part of the answer.

Raises:
    ValueError, TypeError: as BatchingQueue.enqueue.
    ClosedBatchingQueue: the batcher was closed.
    AsyncError: the batch was dropped unanswered or answered with an error.
)")
      .def("size", &DynamicBatcher::size, "The number of inputs that wait.")
      .def(
          "close",
          [](DynamicBatcher& self) {
            WithoutGil no_gil;
            if (!self.close()) {
              throw std::runtime_error("the batcher was closed already");
            }
          },
          R"(
End all compute() calls and all iterations.

Raises:
    RuntimeError: it was closed already.
)")
      .def("is_closed", &DynamicBatcher::is_closed)
      .def(
          "stats", [](const DynamicBatcher& self) { return to_dict(self.stats()); },
          "Counters, as BatchingQueue.stats().")
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", [](DynamicBatcher& self) {
        std::shared_ptr<Batch> batch;
        {
          WithoutGil no_gil;
          batch = self.next(check_signals());
        }
        if (!batch) throw py::stop_iteration();
        return batch;
      });
}

void bind_pool(py::module_& m) {
  py::class_<Pool>(m, "ActorPool", R"(
Runs the environments of servers against batched inference, and makes rollouts.

For every address one stream of E environments. For every step the pool hands
inference_batcher

    ((observation, reward, done, episode_step, episode_return), agent_state)

with leaves [1, E, ...] (reward and episode_return float32, done bool, episode_step
int64); where the environment has extra fields, a dict of these comes sixth. It expects

    ((action, ...), new_agent_state)

or a dict with the key "action" in place of the tuple, every leaf [1, E, ...]. The state
comes back as it was given: where done is true the agent begins with a new one. After
unroll_length steps (T) it enqueues

    ((env_outputs, agent_outputs), initial_agent_state)

into learner_queue, leaves [T+1, E, ...]: the outputs in row t are the agent's answer to
row t, row 0 is the last row of the rollout before, and the state is the one before row 0.

With named_rows, rows are dicts. The batcher gets (row, agent_state), the agent answers
with a dict of outputs, and the queue gets (rows, initial_agent_state). A row has
observation, reward, done, episode_step, episode_return, the extra fields, and game_over,
game_step and game_return, which are the episode's unless the environment has such fields.
The queue's rows have the agent's outputs, too; of two fields with one name, the agent's.

Actions are what the policy draws: integers count from 0 whatever the action space's
start, and floats are float32. They must fit the action space where the server tells one.

If the environments of a step were truncated, see Server, and the outputs are a dict with
"baseline" and "truncation_value" (both float32 [1, E]), the batcher is also asked about
the final observation, and its baseline becomes the truncation_value of that row.

Args:
    unroll_length: T, at least 1.
    learner_queue: a BatchingQueue with batch_dim 1.
    inference_batcher: a DynamicBatcher with batch_dim 1.
    env_server_addresses: one stream for each, such as "unix:/tmp/polybeast.0" or
        "host:port"; an address may occur several times. May be empty with a listener.
    initial_agent_state: nest of [layers, n, ...], n being 1 (the same for every
        environment) or E; () for none.
    named_rows: hand out rows as dicts.
    max_rollout_bytes: of the rollouts in progress of all streams together, whose sizes the
        environments announce. A stream that would exceed it is refused. As much again may
        wait in the queue. None: half of the memory that this process may use.
    step_timeout_s: seconds that an environment may take for a step.
    maximum_downtime_s: the run ends if there is no stream at all for so long. A stream
        that is lost or refused is dialled again, and its unfinished rollout is dropped
        and counted. One that has joined may come back within that time and goes on in
        its rollout.
    max_env_failures: environments that may raise within a minute; each costs its stream.
    hello: "hello" of what probe() returned: what all environments must be. None: as the
        first that connects.
    expected: what environments must be, as the learner's flags say: a dict of name (str),
        num_envs (int) and settings (dict of str), each of which may be missing. Others
        are refused by name of what differs.
    seed: of the run; each stream gets it, with a number that no other stream has had,
        see Server. None: they get neither. With a listener, its own seed counts.
    first_stream, stream_stride: the first stream of address i gets the number
        first_stream + i * stream_stride, later ones those that follow.
    listener: a Listener that has been started, or None: environments that join there are
        run, too. It serves one pool at a time.
    tls_ca: path of a PEM file: certificates that the server's must be signed by. With it,
        or with the next two, host:port addresses are dialled with TLS.
    tls_cert, tls_key: paths of PEM files: the certificate to show, and its key.
    tls_server_name: the name in the server's certificate, if it is not the host's.
    token: shown to the servers.
    insecure: allow plain TCP to other machines.

Raises:
    ValueError: an argument that makes no sense, a file that cannot be read.
)")
      .def(py::init([](int64_t unroll_length,
                       std::shared_ptr<BatchingQueue> learner_queue,
                       std::shared_ptr<DynamicBatcher> inference_batcher,
                       std::vector<std::string> env_server_addresses,
                       const py::object& initial_agent_state, bool named_rows,
                       std::optional<int64_t> max_rollout_bytes, double step_timeout_s,
                       double maximum_downtime_s, int64_t max_env_failures,
                       const std::optional<py::bytes>& hello,
                       const JoinListener* listener, const Expected& expected,
                       std::optional<uint64_t> seed, uint64_t first_stream,
                       uint64_t stream_stride, const Path& tls_ca, const Path& tls_cert,
                       const Path& tls_key,
                       const std::optional<std::string>& tls_server_name,
                       const std::optional<std::string>& token, bool insecure) {
             ActorPoolOptions options;
             options.unroll_length = unroll_length;
             options.named_rows = named_rows;
             if (max_rollout_bytes) {
               if (*max_rollout_bytes < 1) {
                 throw py::value_error("max_rollout_bytes must be at least 1, got " +
                                       std::to_string(*max_rollout_bytes));
               }
               options.max_rollout_bytes = static_cast<uint64_t>(*max_rollout_bytes);
             }
             options.addresses = std::move(env_server_addresses);
             if (listener != nullptr) options.listener = listener->share();
             options.security = to_security(tls_ca, tls_cert, tls_key, tls_server_name,
                                            token, insecure);
             options.step_timeout =
                 to_positive_seconds(step_timeout_s, "step_timeout_s");
             options.maximum_downtime =
                 to_seconds(maximum_downtime_s, "maximum_downtime_s");
             options.max_env_failures = max_env_failures;
             if (hello && !options.hello.emplace().ParseFromString(*hello)) {
               throw std::invalid_argument("hello is not what probe() has returned");
             }
             options.expected = to_expected(expected);
             options.seed = seed;
             options.first_stream = first_stream;
             options.stream_stride = stream_stride;
             auto pool = std::make_shared<ActorPool>(
                 std::move(options), std::move(learner_queue),
                 std::move(inference_batcher), nest_from_python(initial_agent_state));
             return std::make_unique<Pool>(
                 std::move(pool), +[](ActorPool& pool) { pool.close(); });
           }),
           py::arg("unroll_length"), py::arg("learner_queue").none(false),
           py::arg("inference_batcher").none(false), py::arg("env_server_addresses"),
           py::arg("initial_agent_state"), py::kw_only(), py::arg("named_rows") = false,
           py::arg("max_rollout_bytes") = py::none(), py::arg("step_timeout_s") = 60.0,
           py::arg("maximum_downtime_s") = 60.0, py::arg("max_env_failures") = 10,
           py::arg("hello") = py::none(), py::arg("listener") = py::none(),
           py::arg("expected") = py::none(), py::arg("seed") = py::none(),
           py::arg("first_stream") = 0, py::arg("stream_stride") = 1,
           py::arg("tls_ca") = py::none(), py::arg("tls_cert") = py::none(),
           py::arg("tls_key") = py::none(), py::arg("tls_server_name") = py::none(),
           py::arg("token") = py::none(), py::arg("insecure") = false)
      .def(
          "run",
          [](Pool& self) {
            WithoutGil no_gil;
            self->run(check_signals());
          },
          R"(
Run until close() is called or the queue or the batcher is closed. To be called once.

Raises the first error that ends it:
    ValueError: the agent's outputs or the state don't fit; says where.
    RefusedError: all servers say no, for example to the token.
    TransportError: there was no stream at all for too long; with the last reason.
    RuntimeError: environments raised too often; with the last one's traceback.
    AsyncError: inference failed.
)")
      .def(
          "close",
          [](Pool& self) {
            WithoutGil no_gil;
            self->close();
          },
          "End run(). May be called from any thread, any number of times.")
      .def(
          "count", [](const Pool& self) { return self->count(); },
          "The number of environment steps: E for each step of a stream.")
      .def(
          "stats", [](const Pool& self) { return to_dict(self->stats()); }, R"(
Counters since the beginning: num_steps, num_rollouts, num_reconnects, num_dropped_steps,
num_connected (streams now), num_refused (dialled streams), num_env_failures, bytes_received, bytes_copied, pool_bytes, and, summed over
streams, env_seconds (what the environments needed for their steps), env_wait_seconds,
inference_wait_seconds, queue_wait_seconds; last_error says why a stream was lost last.
)")
      .def(
          "events", [](const Pool& self) { return to_tuple(self->events().take()); },
          R"(
What has happened to streams since the last call: a list of (seconds since 1970, kind,
text), and the number of older events that were forgotten. Kinds are "lost", "returned",
"refused", and "env_error", which means that an environment has raised. A listener has the
refusals of those that have joined.
)");

  m.def(
      "probe",
      [](const std::string& address, double timeout_s, const Expected& expected,
         const Path& tls_ca, const Path& tls_cert, const Path& tls_key,
         const std::optional<std::string>& tls_server_name,
         const std::optional<std::string>& token, bool insecure) {
        const Security security =
            to_security(tls_ca, tls_cert, tls_key, tls_server_name, token, insecure);
        const Milliseconds timeout = to_positive_seconds(timeout_s, "timeout_s");
        const ExpectedEnvironment must_be = to_expected(expected);
        wire::EnvHello hello;
        {
          WithoutGil no_gil;
          hello =
              ActorPool::probe(address, security, timeout, must_be, check_signals());
        }
        return to_dict(hello);
      },
      py::arg("address"), py::arg("timeout_s") = 10.0, py::kw_only(),
      py::arg("expected") = py::none(), py::arg("tls_ca") = py::none(),
      py::arg("tls_cert") = py::none(), py::arg("tls_key") = py::none(),
      py::arg("tls_server_name") = py::none(), py::arg("token") = py::none(),
      py::arg("insecure") = false, R"(
Ask an environment server what it serves; makes one environment there and ends it.

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
    action_space: such a dict of what the policy writes, or None: any actions are taken
    extra_fields: dict from name to a dict of dtype and shape, in the order of a step
    settings: dict of str, the flags that the environments were made with; maybe empty
    step_bytes: of all arrays of a step
    hello: bytes, for ActorPool and Listener.refuse

`expected` and the security arguments are those of ActorPool.

Raises:
    RefusedError: the server says no, for example to the token, or is not as expected.
    TransportError: no answer within timeout_s seconds.
    WireError: the answer breaks the protocol's rules.
    RuntimeError: the environment raised; with its traceback.
)");
}

void bind_server(py::module_& m) {
  py::class_<Server>(m, "Server", R"(
Serves environments: each stream has one of its own, made by env_class().

env_class() gives one of two.

A single environment, E = 1, with reset() and step(action) of the old Gym (observation; 4
values) or of Gymnasium (observation, info; 5 values). Its observation may be any nest of
arrays and numbers. With attributes observation_space and action_space (of gymnasium or
gym: Box, Discrete, MultiDiscrete, MultiBinary, Tuple, Dict) these are told to the
learner; else the observation's space is taken from the first one, and actions are
unchecked. It is reset in the step that ends an episode: the row then holds the first
observation of the next, the reward of the last step, and length and return of the episode
that has ended. Truncated episodes end as terminated ones do, and there are no extra
fields. step() gets an int for a Discrete action, else a NumPy array of the space's dtype,
nested as the space is; a Discrete's start is added, and floats are clipped into their
bounds.

E environments in lockstep, which reset themselves: an object with num_envs,
observation_space and action_space (of a single environment), and the methods initial()
and step(actions). These return a row: a dict of "observation" (nested), "reward", "done",
"episode_step", "episode_return" and any other fields, every array [E, ...]. The others
become extra fields of the pool, in the order of their names. If there is a field
"truncated" (bool [E]), the attribute final_observation (None or nested [E, ...]) tells
the last observations of truncated episodes. step() gets what the policy wrote, [E, ...],
nested as the action space is. torchbeast.core.environment.Environment is such an object.
Arrays of a row must keep their contents until the next call.

Both may have a method begin_stream(seed, stream), which is called before the first reset()
or initial(): seed is the run's, and stream the number of this stream, which no other
stream of the run has had. A single environment without it gets a seed made from both, if
its reset() takes one or it has seed() of the old Gym. There may be no call at all: if the
learner does not say these numbers, or only asks what is served.

If it has close(), that is called when the stream ends. What it raises travels to the
learner as text, with its traceback.

Args:
    env_class: called without arguments, in a thread of the stream's own.
    server_address: "unix:/path" or "host:port"; port 0: a free one, see `address`.
    max_streams: at once; more are refused.
    name: what probe() says it is, such as the --env of a run.
    settings: dict of str, the flags that the environments are made with. A learner that
        has others refuses them.
    tls_cert, tls_key: paths of PEM files: the server's certificate and its key. With them
        a host:port address speaks TLS.
    tls_ca: path of a PEM file: only clients whose certificates these have signed may
        connect.
    tls_server_name: for symmetry with ActorPool; a server has no use for it.
    token: clients must show it.
    insecure: allow plain TCP that other machines can reach.

Raises:
    ValueError: an argument that makes no sense, a file that cannot be read.
)")
      .def(py::init([](py::object env_class, std::string server_address,
                       int max_streams, std::string name, const Settings& settings,
                       const Path& tls_ca, const Path& tls_cert, const Path& tls_key,
                       const std::optional<std::string>& tls_server_name,
                       const std::optional<std::string>& token, bool insecure) {
             EnvServerOptions options;
             options.address = std::move(server_address);
             options.security = to_security(tls_ca, tls_cert, tls_key, tls_server_name,
                                            token, insecure);
             options.max_streams = max_streams;
             auto server = std::make_shared<EnvServer>(
                 environment_factory(std::move(env_class), std::move(name), settings),
                 std::move(options));
             return std::make_unique<Server>(
                 std::move(server), +[](EnvServer& server) { server.stop(); });
           }),
           py::arg("env_class"), py::arg("server_address") = "unix:/tmp/polybeast",
           py::kw_only(), py::arg("max_streams") = 256, py::arg("name") = "",
           py::arg("settings") = Settings(), py::arg("tls_ca") = py::none(),
           py::arg("tls_cert") = py::none(), py::arg("tls_key") = py::none(),
           py::arg("tls_server_name") = py::none(), py::arg("token") = py::none(),
           py::arg("insecure") = false)
      .def(
          "run",
          [](Server& self) {
            WithoutGil no_gil;
            try {
              self->run(check_signals());
            } catch (...) {
              self->stop();
              throw;
            }
          },
          R"(
Serve until stop() is called; start() first, if that has not been done. Ctrl-C stops, too.

Raises:
    RuntimeError: as start().
)")
      .def(
          "start",
          [](Server& self) {
            WithoutGil no_gil;
            self->start();
          },
          R"(
Listen from here on, without blocking. A unix socket is the user's alone; one that a dead
server has left is replaced.

Raises:
    RuntimeError: it cannot listen there; says why.
)")
      .def(
          "stop",
          [](Server& self, double timeout_s) {
            const Milliseconds timeout = to_seconds(timeout_s, "timeout_s");
            WithoutGil no_gil;
            self->stop(timeout);
          },
          py::arg("timeout_s") = 5.0, R"(
End all streams, wait for their environments to be closed, and remove the unix socket.
Environments that do not return within timeout_s seconds of the first call are left behind,
and a line on stderr names them. May be called from any thread, any number of times. An
environment that calls it is not waited for.
)")
      .def_property_readonly(
          "address", [](const Server& self) { return self->address(); },
          "Where it listens, with the port that it has found.")
      .def(
          "stats", [](const Server& self) { return to_dict(self->stats()); }, R"(
num_streams (now), and counters since the beginning: num_steps (E for each), num_refused,
bytes_sent, bytes_copied.
)");
}

void bind_listener(py::module_& m) {
  py::class_<JoinListener>(m, "Listener", R"(
Lets environments dial the learner: those behind NAT, or such that come and go. Client is
their side; any program that speaks libtorchbeast/proto/torchbeast.proto is another.

An ActorPool that was given the listener runs them. Each has a place with an unroll. One
that is lost may come back and goes on where it was; one that has left between episodes
hands its unroll over to whoever joins next.

Args:
    address: "unix:/path" or "host:port"; port 0: a free one, see `address`.
    max_streams: places; who finds them taken is told to try again later.
    expected, seed: as of ActorPool; streams get numbers in the order in which they come.
    hello_timeout_s: seconds that an environment may take for its hello, which may need its
        first reset.
    tls_cert, tls_key, tls_ca, token, insecure: as of Server.

Raises:
    ValueError: an argument that makes no sense, a file that cannot be read.
)")
      .def(py::init([](std::string address, int max_streams, const Expected& expected,
                       std::optional<uint64_t> seed, double hello_timeout_s,
                       const Path& tls_ca, const Path& tls_cert, const Path& tls_key,
                       const std::optional<std::string>& token, bool insecure) {
             ListenerOptions options;
             options.expected = to_expected(expected);
             options.seed = seed;
             options.hello_timeout =
                 to_positive_seconds(hello_timeout_s, "hello_timeout_s");
             options.address = std::move(address);
             options.security =
                 to_security(tls_ca, tls_cert, tls_key, std::nullopt, token, insecure);
             options.max_streams = max_streams;
             auto listener = std::make_shared<Listener>(std::move(options));
             return std::make_unique<JoinListener>(
                 std::move(listener), +[](Listener& listener) { listener.close(); });
           }),
           py::arg("address"), py::kw_only(), py::arg("max_streams") = 256,
           py::arg("expected") = py::none(), py::arg("seed") = py::none(),
           py::arg("hello_timeout_s") = 60.0, py::arg("tls_ca") = py::none(),
           py::arg("tls_cert") = py::none(), py::arg("tls_key") = py::none(),
           py::arg("token") = py::none(), py::arg("insecure") = false)
      .def(
          "start",
          [](JoinListener& self) {
            WithoutGil no_gil;
            self->start();
          },
          R"(
Listen from here on, without blocking; environments that join wait for a pool.

Raises:
    RuntimeError: it cannot listen there; says why.
)")
      .def(
          "close",
          [](JoinListener& self) {
            WithoutGil no_gil;
            self->close();
          },
          R"(
End all streams and remove the unix socket. May be called from any thread, any number of
times.
)")
      .def(
          "probe",
          [](JoinListener& self, double timeout_s) {
            const Milliseconds timeout = to_positive_seconds(timeout_s, "timeout_s");
            wire::EnvHello hello;
            {
              WithoutGil no_gil;
              hello = self->probe(timeout, check_signals());
            }
            return to_dict(hello);
          },
          py::arg("timeout_s") = 60.0, R"(
Wait until an environment has joined whose hello keeps the rules, and return what it is, as
probe(). A pool with this hello refuses all others.

Raises:
    TransportError: none within timeout_s seconds.
)")
      .def(
          "refuse",
          [](JoinListener& self, const py::bytes& hello, const std::string& reason) {
            wire::EnvHello parsed;
            if (!parsed.ParseFromString(hello)) {
              throw std::invalid_argument("hello is not what probe() has returned");
            }
            WithoutGil no_gil;
            self->refuse(parsed, reason);
          },
          py::arg("hello"), py::arg("reason"), R"(
Environments that come with the "hello" of what probe() returned are of no use: they are
refused with this reason, and probe() waits for another.
)")
      .def(
          "events",
          [](const JoinListener& self) { return to_tuple(self->events().take()); },
          "As ActorPool.events(): who was refused, and which raised before the hello.")
      .def_property_readonly(
          "address", [](const JoinListener& self) { return self->address(); },
          "Where it listens, with the port that it has found.")
      .def(
          "stats", [](const JoinListener& self) { return to_dict(self->stats()); }, R"(
num_streams (now), num_refused (since the beginning), last_refusal (why; maybe empty).
)");
}

void bind_client(py::module_& m) {
  py::class_<Client>(m, "Client", R"(
Dials the learner, which listens, and runs one environment (of E) there.

Args:
    env_class: called once, without arguments; gives an environment as Server describes.
    learner_address: "unix:/path" or "host:port", where a Listener is.
    name: what the learner is told that it is, such as the --env of a run.
    settings: as of Server.
    maximum_downtime_s: seconds that there may be no learner, also at first; None: for
        ever. Waiting for an action does not count.
    The security arguments are those of ActorPool.

Raises:
    ValueError: an argument that makes no sense, a file that cannot be read.
)")
      .def(py::init([](py::object env_class, std::string learner_address,
                       std::string name, std::optional<double> maximum_downtime_s,
                       const Settings& settings, const Path& tls_ca,
                       const Path& tls_cert, const Path& tls_key,
                       const std::optional<std::string>& tls_server_name,
                       const std::optional<std::string>& token, bool insecure) {
             EnvClientOptions options;
             options.address = std::move(learner_address);
             options.security = to_security(tls_ca, tls_cert, tls_key, tls_server_name,
                                            token, insecure);
             options.maximum_downtime.reset();
             if (maximum_downtime_s) {
               options.maximum_downtime =
                   to_seconds(*maximum_downtime_s, "maximum_downtime_s");
             }
             auto client = std::make_shared<EnvClient>(
                 environment_factory(std::move(env_class), std::move(name), settings),
                 std::move(options));
             return std::make_unique<Client>(
                 std::move(client), +[](EnvClient& client) { client.stop(); });
           }),
           py::arg("env_class"), py::arg("learner_address"), py::arg("name") = "",
           py::kw_only(), py::arg("maximum_downtime_s") = 60.0,
           py::arg("settings") = Settings(), py::arg("tls_ca") = py::none(),
           py::arg("tls_cert") = py::none(), py::arg("tls_key") = py::none(),
           py::arg("tls_server_name") = py::none(), py::arg("token") = py::none(),
           py::arg("insecure") = false)
      .def(
          "run",
          [](Client& self, std::optional<int64_t> num_episodes) {
            std::optional<uint64_t> number;
            if (num_episodes) number = to_size(*num_episodes, "num_episodes");
            WithoutGil no_gil;
            self->run(number, check_signals());
          },
          py::arg("num_episodes") = py::none(), R"(
Make the environment, dial, reset it once the learner has answered, and step as the
learner says, until stop() is called or Ctrl-C comes; with num_episodes, until the episodes of all E have ended together so many times,
and leave then. A lost connection is dialled again, and the environment goes on where it
was. To be called once.

Raises:
    RefusedError: the learner says no, for example to the token.
    TransportError: no learner for too long.
    RuntimeError: the environment raised; with its traceback. The learner is told, too.
)")
      .def(
          "stop",
          [](Client& self, double timeout_s) {
            const Milliseconds timeout = to_seconds(timeout_s, "timeout_s");
            WithoutGil no_gil;
            self->stop(timeout);
          },
          py::arg("timeout_s") = 5.0, R"(
End run(), once a step in progress is made. If the environment does not return within
timeout_s seconds, run() leaves it behind and writes a line to stderr. Does not wait. May be
called from any thread, any number of times.
)")
      .def(
          "stats", [](const Client& self) { return to_dict(self->stats()); }, R"(
connected (now), and counters since the beginning: num_steps (E for each), num_episodes
(steps in which those of all E have ended), num_reconnects, bytes_sent; last_error says
why it was without a learner last.
)");
}

}  // namespace

PYBIND11_MODULE(libtorchbeast, m) {
  m.doc() =
      R"(The C++ core of PolyBeast: queues, batching, actor pool, environments.

Nests are tuples, lists and dicts of leaves; leaves are torch tensors on the CPU or NumPy
arrays. What comes out has tuples and dicts, and as leaves torch tensors where torch is
imported, else NumPy arrays, sharing memory. torch is never imported here.

Calls that block let other threads run and can be interrupted by Ctrl-C.
)";
  bind_errors(m);
  bind_queue(m);
  bind_batcher(m);
  bind_listener(m);  // before what takes one
  bind_pool(m);
  bind_server(m);
  bind_client(m);
  register_exit();
}

}  // namespace torchbeast::python
