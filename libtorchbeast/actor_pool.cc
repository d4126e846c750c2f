#include "actor_pool.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <future>
#include <optional>
#include <thread>
#include <utility>

namespace torchbeast {

namespace {

constexpr Milliseconds kFirstBackoff{100};
constexpr Milliseconds kLongestBackoff{1'000};
// So many connections in a row that end before a rollout is finished are not bad luck.
constexpr int kMaximumFruitless = 10;
constexpr size_t kStandardFields = 4;  // reward, done, episode_step, episode_return

// Ends an actor's thread in peace.
struct Stopped {};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string in_seconds(Milliseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// Dialling again does not help against a refusal that has a reason.
bool is_final(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
    case grpc::StatusCode::UNIMPLEMENTED:
      return true;
    default:
      return false;
  }
}

// --- One stream
// -----------------------------------------------------------------------

class Connection {
 public:
  Connection(const Address& address, const Security& security)
      : address_(address.to_string()) {
    grpc::ChannelArguments arguments = channel_arguments();
    if (!security.server_name.empty()) {
      arguments.SetSslTargetNameOverride(security.server_name);
    }
    channel_ = grpc::CreateCustomChannel(
        address_, client_credentials(address, security), arguments);
    if (!security.token.empty()) {
      context_.AddMetadata("authorization", "Bearer " + security.token);
    }
  }

  ~Connection() {
    context_.TryCancel();
    if (stream_ != nullptr && !finished_) stream_->Finish();
  }

  // Dials. From here on cancel() may be called by other threads.
  void open() { stream_ = open_stream(channel_.get(), &context_); }

  wire::EnvHello shake_hands() {
    wire::AgentMessage hello;
    hello.mutable_hello()->set_version(kWireVersion);
    write(encode(hello));
    grpc::ByteBuffer message;
    read(&message);
    const Destination none = [](size_t, const ArraySpec&) -> Array {
      throw WireError("a step before the hello");
    };
    Decoded decoded = decode_env_message(&message, none, none);
    if (decoded.kind == Decoded::kError) {
      throw std::runtime_error("the environment at " + address_ + " failed:\n" +
                               decoded.error);
    }
    if (decoded.kind != Decoded::kHello) throw WireError("no hello");
    return std::move(decoded.env_hello);
  }

  void write(const grpc::ByteBuffer& message) {
    if (!stream_->Write(message)) throw_status();
  }

  void read(grpc::ByteBuffer* message) {
    if (!stream_->Read(message)) throw_status();
  }

  // Makes a read or write that waits fail, with this reason. `reason` must stay.
  void cancel(const char* reason) {
    reason_ = reason;
    context_.TryCancel();
  }

 private:
  [[noreturn]] void throw_status() {
    const grpc::Status status = stream_->Finish();
    finished_ = true;
    const char* reason = reason_;
    const std::string text = "the environment server at " + address_;
    if (reason != nullptr) throw TransportError(text + " " + reason, true);
    if (status.ok()) throw TransportError(text + " has ended the stream", true);
    if (is_final(status.error_code())) {
      throw RefusedError(text + " refuses: " + status.error_message());
    }
    throw TransportError(text + " is lost: " + status.error_message(), true);
  }

  const std::string address_;
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<AgentStream> stream_;
  bool finished_ = false;
  std::atomic<const char*> reason_{nullptr};
};

}  // namespace

// --- What the actors share
// ------------------------------------------------------------

struct ActorPool::Shared {
  Shared(ActorPoolOptions options, std::shared_ptr<BatchingQueue> learner_queue,
         std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_state)
      : options(std::move(options)),
        learner_queue(std::move(learner_queue)),
        inference_batcher(std::move(inference_batcher)),
        initial_state(std::move(initial_state)) {}

  void close() TB_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      closing = true;
    }
    changed.notify_all();
  }

  void fail(std::exception_ptr error) TB_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      if (!closing && first_error == nullptr) first_error = std::move(error);
      closing = true;
    }
    changed.notify_all();
  }

  // Sleeps, but not beyond close().
  void sleep(Milliseconds time) TB_EXCLUDES(mutex) {
    const auto end = Clock::now() + time;
    MutexLock lock(mutex);
    while (!closing && Clock::now() < end) changed.wait_until(mutex, end, nullptr);
  }

  // Every stream must have the spaces and fields of the first.
  void check_hello(const wire::EnvHello& hello, const std::string& address)
      TB_EXCLUDES(mutex) {
    const std::string bytes = hello.SerializeAsString();
    MutexLock lock(mutex);
    if (first_hello.empty()) {
      first_hello = bytes;
      first_address = address;
    } else if (bytes != first_hello) {
      wire::EnvHello first;
      first.ParseFromString(first_hello);
      throw TransportError("the environments at " + first_address + " and " + address +
                               " differ, and those of one run must not. The first: " +
                               first.ShortDebugString() +
                               ". The second: " + hello.ShortDebugString(),
                           false);
    }
  }

  const ActorPoolOptions options;
  const std::shared_ptr<BatchingQueue> learner_queue;
  const std::shared_ptr<DynamicBatcher> inference_batcher;
  const ArrayNest initial_state;  // [layers, 1 or E, ...]

  MemoryPool rollout_pool;
  MemoryPool message_pool;

  std::atomic<bool> closing{false};  // written under the mutex, for sleepers
  std::atomic<bool> started{false};
  Mutex mutex;
  CondVar changed;
  std::exception_ptr first_error TB_GUARDED_BY(mutex);
  std::string first_hello TB_GUARDED_BY(mutex);
  std::string first_address TB_GUARDED_BY(mutex);
  std::string last_error TB_GUARDED_BY(mutex);

  std::atomic<uint64_t> num_steps{0};
  std::atomic<uint64_t> num_rollouts{0};
  std::atomic<uint64_t> num_reconnects{0};
  std::atomic<uint64_t> num_dropped_steps{0};
  std::atomic<uint64_t> num_connected{0};
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> bytes_copied{0};
  std::atomic<uint64_t> env_wait_ns{0};
  std::atomic<uint64_t> inference_wait_ns{0};
  std::atomic<uint64_t> queue_wait_ns{0};
};

namespace {

// Adds the time from construction to destruction.
class WaitTimer {
 public:
  explicit WaitTimer(std::atomic<uint64_t>* total)
      : total_(total), start_(Clock::now()) {}
  ~WaitTimer() { *total_ += static_cast<uint64_t>(seconds_since(start_) * 1e9); }

 private:
  std::atomic<uint64_t>* const total_;
  const Clock::time_point start_;
};

}  // namespace

// --- One actor
// ------------------------------------------------------------------------

class ActorPool::Actor {
 public:
  Actor(Shared* shared, const std::string& address)
      : shared_(*shared), address_(address), interrupt_([this] {
          if (shared_.closing) throw Stopped();
        }) {}

  // The thread.
  void run() {
    try {
      while (true) {
        try {
          run_stream();
        } catch (const TransportError& error) {
          if (shared_.closing) throw Stopped();
          after_loss(error);
        }
      }
    } catch (const Stopped&) {
      shared_.close();
    } catch (const ClosedBatchingQueue&) {
      shared_.close();
    } catch (const WireError& error) {
      shared_.fail(std::make_exception_ptr(
          WireError("the environment server at " + address_.to_string() +
                    " breaks the rules: " + error.what())));
    } catch (...) {
      shared_.fail(std::current_exception());
    }
  }

  // From the thread of ActorPool::run().
  void cancel(const char* reason) TB_EXCLUDES(connection_mutex_) {
    MutexLock lock(connection_mutex_);
    if (connection_ != nullptr) connection_->cancel(reason);
  }
  void cancel_if_stuck() {
    const int64_t since = waiting_since_;
    if (since == 0) return;
    const Clock::time_point start{Clock::duration(since)};
    if (Clock::now() - start > shared_.options.step_timeout) cancel(kStuck);
  }

 private:
  struct Rollout {
    ArrayNest initial_state;         // of row 0, [layers, E, ...]
    std::vector<Array> env;          // [T+1, E, ...], in the wire's order
    std::optional<ArrayNest> agent;  // [T+1, E, ...]
  };

  // Makes the connection known to cancel(), and unknown before it ends.
  class Registration {
   public:
    Registration(Actor* actor, Connection* connection) : actor_(*actor) {
      set(connection);
    }
    ~Registration() { set(nullptr); }

   private:
    void set(Connection* connection) {
      MutexLock lock(actor_.connection_mutex_);
      actor_.connection_ = connection;
    }
    Actor& actor_;
  };

  void after_loss(const TransportError& error) {
    const auto& options = shared_.options;
    {
      MutexLock lock(shared_.mutex);
      shared_.last_error = error.what();
    }
    if (!error.may_pass) throw;  // the error that is being handled
    if (connected_ && ++fruitless_ >= kMaximumFruitless) {
      throw TransportError(std::to_string(fruitless_) +
                               " connections in a row have not lasted for a rollout; "
                               "the last: " +
                               error.what(),
                           false);
    }
    if (Clock::now() - down_since_ > options.maximum_downtime) {
      throw TransportError("no connection for " + in_seconds(options.maximum_downtime) +
                               ": " + error.what(),
                           false);
    }
    shared_.sleep(backoff_);
    if (shared_.closing) throw Stopped();
    backoff_ = std::min(2 * backoff_, kLongestBackoff);
  }

  // From dialling until the stream is lost, which is a TransportError.
  void run_stream() {
    connected_ = false;
    Connection connection(address_, shared_.options.security);
    const Registration registration(this, &connection);
    interrupt_();  // run() cancels once, perhaps just before
    {
      const Waiting waiting(this);
      connection.open();
      const wire::EnvHello hello = connection.shake_hands();
      shared_.check_hello(hello, address_.to_string());
      spec_ = StreamSpec(hello);
    }
    truncated_ = find_extra_field("truncated");
    Rollout rollout = make_rollout(tile(shared_.initial_state));
    std::vector<Array> final_observation;
    {
      const Waiting waiting(this);
      read_step(connection, rollout, 0, &final_observation);
    }
    if (lost_before_) ++shared_.num_reconnects;
    connected_ = lost_before_ = true;
    ++shared_.num_connected;
    int64_t t = 0;
    try {
      unroll(connection, rollout, t);
    } catch (...) {
      --shared_.num_connected;
      shared_.num_dropped_steps += static_cast<uint64_t>(t * spec_.num_envs);
      down_since_ = Clock::now();
      throw;
    }
  }

  // Steps for ever; `t` says how many steps of `rollout` are unfinished.
  void unroll(Connection& connection, Rollout& rollout, int64_t& t) {
    const int64_t T = shared_.options.unroll_length;
    ArrayNest state = rollout.initial_state;
    std::vector<Array> final_observation;
    std::vector<Array> action = infer(rollout, 0, &state, final_observation);
    while (true) {
      {
        const WaitTimer timer(&shared_.env_wait_ns);
        const Waiting waiting(this);
        connection.write(encode_action(action, shared_.message_pool));
        read_step(connection, rollout, t + 1, &final_observation);
      }
      ++t;
      shared_.num_steps += static_cast<uint64_t>(spec_.num_envs);
      down_since_ = Clock::now();
      backoff_ = kFirstBackoff;
      const ArrayNest state_before = state;
      action = infer(rollout, t, &state, final_observation);
      if (t == T) {
        Rollout next = make_rollout(state_before);
        copy_row(rollout, T, next, 0);
        enqueue(std::move(rollout));
        rollout = std::move(next);
        t = 0;
        fruitless_ = 0;
      }
    }
  }

  void read_step(Connection& connection, const Rollout& rollout, int64_t t,
                 std::vector<Array>* final_observation) {
    grpc::ByteBuffer message;
    connection.read(&message);
    shared_.bytes_received += message.Length();
    std::vector<Array> row;
    row.reserve(rollout.env.size());
    for (const Array& array : rollout.env) row.push_back(array.at(t));
    final_observation->clear();
    const auto into_final = [&](size_t i, const ArraySpec& spec) {
      if (i >= spec_.num_observation_arrays || spec != spec_.arrays[i]) {
        throw WireError("final_observation has " + spec.to_string() + " as array " +
                        std::to_string(i) + ", not as the observation");
      }
      final_observation->push_back(shared_.message_pool.allocate(spec));
      return final_observation->back();
    };
    const Decoded decoded =
        decode_env_message(&message, expect(spec_.arrays, row, "step"), into_final);
    if (decoded.kind == Decoded::kError) {
      throw std::runtime_error("the environment at " + address_.to_string() +
                               " failed:\n" + decoded.error);
    }
    if (decoded.kind != Decoded::kStep) throw WireError("a second hello");
    if (decoded.num_arrays != row.size()) {
      throw WireError("a step with " + std::to_string(decoded.num_arrays) +
                      " arrays, where the hello announced " +
                      std::to_string(row.size()));
    }
    check_final_observation(row, final_observation->size());
    for (const Array& array : row) shared_.bytes_copied += array.num_bytes();
  }

  void check_final_observation(const std::vector<Array>& row, size_t num_final) const {
    bool any = false;
    if (truncated_ != kNone) {
      const Array& truncated = row[truncated_];
      for (size_t e = 0; e < truncated.num_bytes(); ++e)
        any |= truncated.data()[e] != 0;
    }
    const size_t wanted = any ? spec_.num_observation_arrays : 0;
    if (num_final != wanted) {
      throw WireError("a step with " + std::to_string(num_final) +
                      " arrays of final_observation, where " + std::to_string(wanted) +
                      " are due: all of the observation if an episode was truncated, "
                      "else none");
    }
  }

  // Asks what to do in row t and writes the answer into it; returns the action's
  // arrays, [E, ...]. `state` is the one before, then the one after.
  std::vector<Array> infer(Rollout& rollout, int64_t t, ArrayNest* state,
                           const std::vector<Array>& final_observation) {
    std::vector<Array> row;
    row.reserve(rollout.env.size());
    for (const Array& array : rollout.env) row.push_back(array.row(t));
    std::optional<Array> truncation_value;
    if (!final_observation.empty()) {
      truncation_value = evaluate(row, final_observation, *state);
    }
    ArrayNest outputs = compute(env_nest(std::move(row)), *state);
    write_agent_row(rollout, t, outputs.vector()[0]);
    if (truncation_value) {
      copy(*truncation_value,
           rollout.agent->dict().at("truncation_value").leaf().row(t));
    }
    std::vector<Array> action = action_of(outputs.vector()[0]);
    *state = std::move(outputs.vector()[1]);
    return action;
  }

  // The agent's ((action, ...), new_state), checked.
  ArrayNest compute(ArrayNest env_outputs, const ArrayNest& state) {
    ArrayNest inputs(ArrayNest::Vector{std::move(env_outputs), state});
    ArrayNest outputs;
    {
      const WaitTimer timer(&shared_.inference_wait_ns);
      outputs = shared_.inference_batcher->compute(std::move(inputs), interrupt_);
    }
    if (!outputs.is_vector() || outputs.vector().size() != 2) {
      throw std::invalid_argument(
          "the agent's outputs must be ((action, ...), new_agent_state), and they "
          "are " +
          outputs.describe());
    }
    try {
      nest::for_each2(
          [](const Array& before, const Array& after) {
            if (before.spec() != after.spec()) {
              throw std::invalid_argument("from " + before.spec().to_string() + " to " +
                                          after.spec().to_string());
            }
          },
          state, std::as_const(outputs.vector()[1]));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(
          std::string("the agent state must keep its form, and it changes: ") +
          error.what());
    }
    return outputs;
  }

  // The baseline at the end of truncated episodes, 0 elsewhere; nothing if the agent's
  // outputs have no place for it.
  std::optional<Array> evaluate(const std::vector<Array>& row,
                                const std::vector<Array>& final_observation,
                                const ArrayNest& state) {
    if (!evaluates_) return std::nullopt;
    std::vector<Array> inputs = row;
    for (size_t i = 0; i < final_observation.size(); ++i) {
      inputs[i] = final_observation[i].with_leading_one();
    }
    Array& done = inputs[spec_.num_observation_arrays + 1];
    done = shared_.message_pool.allocate(done.spec());
    std::memset(done.data(), 0, done.num_bytes());
    ArrayNest outputs = compute(env_nest(std::move(inputs)), state);
    const ArrayNest& agent = outputs.vector()[0];
    evaluates_ = agent.is_map() && agent.dict().count("baseline") > 0 &&
                 agent.dict().count("truncation_value") > 0;
    if (!evaluates_) return std::nullopt;
    const ArraySpec wanted{DType::kFloat32, Shape{1, spec_.num_envs}};
    for (const char* name : {"baseline", "truncation_value"}) {
      const ArrayNest& value = agent.dict().at(name);
      if (!value.is_leaf() || value.leaf().spec() != wanted) {
        throw std::invalid_argument("the agent's " + std::string(name) + " must be " +
                                    wanted.to_string());
      }
    }
    Array value = agent.dict().at("baseline").leaf();
    for (int64_t e = 0; e < spec_.num_envs; ++e) {
      if (row[truncated_].data()[e] == 0) value.as<float>()[e] = 0;
    }
    return value;
  }

  void write_agent_row(Rollout& rollout, int64_t t, const ArrayNest& outputs) {
    if (!rollout.agent) {
      rollout.agent = outputs.map([this](const Array& array) {
        const Shape& shape = array.shape();
        if (shape.size() < 2 || shape[0] != 1 || shape[1] != spec_.num_envs) {
          throw std::invalid_argument("the agent's outputs must be [1, " +
                                      std::to_string(spec_.num_envs) +
                                      ", ...], and one is " + shape.to_string());
        }
        ArraySpec spec = array.spec();
        spec.shape[0] = shared_.options.unroll_length + 1;
        return shared_.rollout_pool.allocate(spec);
      });
    }
    try {
      nest::for_each2(
          [&](const Array& from, const Array& to) {
            shared_.bytes_copied += copy(from, to.row(t));
          },
          outputs, std::as_const(*rollout.agent));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(
          std::string("the agent's outputs must keep their form: ") + error.what());
    }
  }

  std::vector<Array> action_of(const ArrayNest& outputs) const {
    const ArrayNest* action = nullptr;
    if (outputs.is_vector() && !outputs.vector().empty()) {
      action = &outputs.vector()[0];
    } else if (outputs.is_map() && outputs.dict().count("action") > 0) {
      action = &outputs.dict().at("action");
    } else {
      throw std::invalid_argument(
          "the agent's outputs must be (action, ...) or a dict with \"action\", and "
          "they are " +
          outputs.describe());
    }
    std::vector<Array> arrays;
    action->for_each([&](const Array& array) { arrays.push_back(array.at(0)); });
    if (spec_.has_action) {
      const std::vector<ArraySpec> wanted = spec_.action.flatten();
      bool fits = wanted.size() == arrays.size();
      for (size_t i = 0; fits && i < wanted.size(); ++i) {
        fits = wanted[i] == arrays[i].spec();
      }
      if (!fits) {
        throw std::invalid_argument("the agent's action is " + describe(arrays) +
                                    ", and the environments want " + describe(wanted) +
                                    " (behind a leading 1)");
      }
    }
    return arrays;
  }

  static const ArraySpec& spec_of(const Array& array) { return array.spec(); }
  static const ArraySpec& spec_of(const ArraySpec& spec) { return spec; }
  template <typename T>
  static std::string describe(const std::vector<T>& arrays) {
    std::string text;
    for (const T& array : arrays) {
      text += (text.empty() ? "" : ", ") + spec_of(array).to_string();
    }
    return text.empty() ? "nothing" : text;
  }

  Rollout make_rollout(ArrayNest initial_state) {
    Rollout rollout;
    rollout.initial_state = std::move(initial_state);
    for (const ArraySpec& spec : spec_.arrays) {
      rollout.env.push_back(shared_.rollout_pool.allocate(
          {spec.dtype, spec.shape.behind({shared_.options.unroll_length + 1})}));
    }
    return rollout;
  }

  void copy_row(const Rollout& from, int64_t from_row, Rollout& to, int64_t to_row) {
    for (size_t i = 0; i < from.env.size(); ++i) {
      shared_.bytes_copied += copy(from.env[i].row(from_row), to.env[i].row(to_row));
    }
    write_agent_row(to, to_row, from.agent->map([from_row](const Array& array) {
      return array.row(from_row);
    }));
  }

  void enqueue(Rollout rollout) {
    ArrayNest item(
        ArrayNest::Vector{ArrayNest(ArrayNest::Vector{env_nest(std::move(rollout.env)),
                                                      std::move(*rollout.agent)}),
                          std::move(rollout.initial_state)});
    const WaitTimer timer(&shared_.queue_wait_ns);
    shared_.learner_queue->enqueue(std::move(item), interrupt_);
    ++shared_.num_rollouts;
  }

  // (observation, reward, done, episode_step, episode_return[, extra fields])
  ArrayNest env_nest(std::vector<Array> arrays) const {
    const auto rest =
        arrays.begin() + static_cast<int64_t>(spec_.num_observation_arrays);
    ArrayNest::Vector fields;
    fields.reserve(1 + kStandardFields + 1);
    fields.push_back(
        nest::pack_as(spec_.observation, std::vector<Array>(arrays.begin(), rest)));
    for (size_t i = 0; i < kStandardFields; ++i) {
      fields.emplace_back(std::move(rest[static_cast<int64_t>(i)]));
    }
    if (!spec_.extra_fields.empty()) {
      ArrayNest::Map extra;
      auto array = rest + kStandardFields;
      for (const std::string& name : spec_.extra_fields) extra.emplace(name, *array++);
      fields.emplace_back(std::move(extra));
    }
    return ArrayNest(std::move(fields));
  }

  size_t find_extra_field(const std::string& name) const {
    const auto& names = spec_.extra_fields;
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) return kNone;
    return spec_.num_observation_arrays + kStandardFields +
           static_cast<size_t>(found - names.begin());
  }

  // [layers, 1, ...] -> [layers, E, ...]
  ArrayNest tile(const ArrayNest& state) {
    return state.map([this](const Array& array) {
      const int64_t n = array.shape()[1];
      if (n == spec_.num_envs) return array;
      if (n == 1) {
        return concatenate(
            std::vector<Array>(static_cast<size_t>(spec_.num_envs), array), 1,
            shared_.message_pool, false);
      }
      throw std::invalid_argument("the initial agent state has " +
                                  array.shape().to_string() +
                                  ", and dimension 1 must be 1 or the number of "
                                  "environments of a stream, " +
                                  std::to_string(spec_.num_envs));
    });
  }

  // While it lives, the stream is waiting for the other side.
  class Waiting {
   public:
    explicit Waiting(Actor* actor) : since_(actor->waiting_since_) {
      since_ = Clock::now().time_since_epoch().count();
    }
    ~Waiting() { since_ = 0; }

   private:
    std::atomic<int64_t>& since_;
  };

  static constexpr size_t kNone = static_cast<size_t>(-1);
  static constexpr char kStuck[] = "has not answered within the step timeout";

  Shared& shared_;
  const Address address_;
  const Interrupt interrupt_;

  Mutex connection_mutex_;
  Connection* connection_ TB_GUARDED_BY(connection_mutex_) = nullptr;
  std::atomic<int64_t> waiting_since_{0};  // ticks of Clock; 0: not waiting

  // Of this thread alone.
  StreamSpec spec_;
  size_t truncated_ = kNone;  // the field's index among a row's arrays
  bool evaluates_ = true;
  bool lost_before_ = false;
  bool connected_ = false;
  int fruitless_ = 0;
  Clock::time_point down_since_ = Clock::now();
  Milliseconds backoff_ = kFirstBackoff;
};

// --- The pool
// -------------------------------------------------------------------------

ActorPool::ActorPool(ActorPoolOptions options,
                     std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     ArrayNest initial_agent_state) {
  if (options.unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be at least 1, got " +
                                std::to_string(options.unroll_length));
  }
  if (options.addresses.empty()) {
    throw std::invalid_argument("env_server_addresses is empty");
  }
  for (const std::string& address : options.addresses) {
    client_credentials(Address(address), options.security);  // checks both
  }
  if (options.step_timeout.count() <= 0 || options.maximum_downtime.count() < 0) {
    throw std::invalid_argument(
        "the step timeout must be above 0 and the maximum downtime not negative");
  }
  MemoryPool pool;  // what comes in may be Python's; actors want memory of their own
  ArrayNest state = initial_agent_state.map([&pool](const Array& array) {
    if (array.shape().size() < 2) {
      throw std::invalid_argument(
          "the initial agent state's arrays must be [layers, n, ...], and one is " +
          array.shape().to_string());
    }
    Array copied = pool.allocate(array.spec());
    copy(array, copied);
    return copied;
  });
  shared_ = std::make_shared<Shared>(std::move(options), std::move(learner_queue),
                                     std::move(inference_batcher), std::move(state));
}

ActorPool::~ActorPool() { close(); }

void ActorPool::run(const Interrupt& interrupt) {
  Shared& shared = *shared_;
  if (shared.started.exchange(true)) {
    throw std::runtime_error("an ActorPool runs once");
  }
  std::vector<std::unique_ptr<Actor>> actors;
  std::vector<std::thread> threads;
  std::exception_ptr error;
  try {
    for (const std::string& address : shared.options.addresses) {
      actors.push_back(std::make_unique<Actor>(&shared, address));
      threads.emplace_back([actor = actors.back().get()] { actor->run(); });
    }
    while (!shared.closing) {
      {
        MutexLock lock(shared.mutex);
        if (!shared.closing) {
          shared.changed.wait_until(shared.mutex, Clock::now() + kInterruptPeriod,
                                    nullptr);
        }
      }
      for (const auto& actor : actors) actor->cancel_if_stuck();
      if (interrupt) interrupt();
      if (shared.learner_queue->is_closed() || shared.inference_batcher->is_closed()) {
        shared.close();
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  shared.close();
  for (const auto& actor : actors) actor->cancel("is no longer wanted");
  for (std::thread& thread : threads) thread.join();
  {
    MutexLock lock(shared.mutex);
    if (error == nullptr) error = shared.first_error;
  }
  if (error != nullptr) std::rethrow_exception(error);
}

void ActorPool::close() { shared_->close(); }

uint64_t ActorPool::count() const { return shared_->num_steps; }

ActorPoolStats ActorPool::stats() const {
  Shared& shared = *shared_;
  ActorPoolStats stats;
  stats.num_steps = shared.num_steps;
  stats.num_rollouts = shared.num_rollouts;
  stats.num_reconnects = shared.num_reconnects;
  stats.num_dropped_steps = shared.num_dropped_steps;
  stats.num_connected = shared.num_connected;
  stats.bytes_received = shared.bytes_received;
  stats.bytes_copied = shared.bytes_copied;
  stats.pool_bytes = shared.rollout_pool.num_bytes() + shared.message_pool.num_bytes();
  stats.env_wait_seconds = static_cast<double>(shared.env_wait_ns) * 1e-9;
  stats.inference_wait_seconds = static_cast<double>(shared.inference_wait_ns) * 1e-9;
  stats.queue_wait_seconds = static_cast<double>(shared.queue_wait_ns) * 1e-9;
  MutexLock lock(shared.mutex);
  stats.last_error = shared.last_error;
  return stats;
}

wire::EnvHello ActorPool::probe(const std::string& address, const Security& security,
                                Milliseconds timeout, const Interrupt& interrupt) {
  Connection connection(Address(address), security);
  std::future<wire::EnvHello> hello = std::async(std::launch::async, [&] {
    connection.open();  // which may take long
    return connection.shake_hands();
  });
  try {
    const auto deadline = Clock::now() + timeout;
    while (hello.wait_for(
               std::min<Clock::duration>(kInterruptPeriod, deadline - Clock::now())) !=
           std::future_status::ready) {
      if (interrupt) interrupt();
      if (Clock::now() >= deadline) connection.cancel("has not answered in time");
    }
  } catch (...) {
    connection.cancel("is no longer wanted");
    hello.wait();
    throw;
  }
  return hello.get();
}

}  // namespace torchbeast
