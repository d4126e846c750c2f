#include "client.h"

#include <atomic>
#include <exception>
#include <iostream>
#include <random>
#include <stdexcept>
#include <utility>

#include "codec.h"
#include "connection.h"
#include "env_runner.h"
#include "thread.h"

namespace torchbeast {

namespace {

// A name that nobody else has.
std::string random_id() {
  std::random_device random;
  std::string id(16, '\0');
  for (char& c : id) c = static_cast<char>(random());
  return id;
}

// Why a client that is to stop cancels its connection.
constexpr char kUnwanted[] = "is no longer wanted";

}  // namespace

struct EnvClient::State {
  State(EnvironmentFactory factory, EnvClientOptions options)
      : factory(std::move(factory)),
        options(std::move(options)),
        address(this->options.address) {
    client_credentials(address, this->options.security);  // checks both
  }

  // In the thread of the environment: one of its own, so that run() can look for
  // signals, or that of run_here().
  void work(std::optional<uint64_t> num_episodes);
  // From dialling until the stream ends: kLeft if the episodes are done. The learner
  // gets what the environment raises.
  End run_stream(EnvRunner& runner, const std::string& stream_id,
                 std::optional<uint64_t> num_episodes);
  void play(DialledConnection& connection, EnvRunner& runner,
            const std::string& stream_id, std::optional<uint64_t> num_episodes);
  // Whether to dial again, after a pause. Throws if there is no sense in it.
  bool goes_on(const End& end);
  // In the other thread.
  void wait(const Interrupt& interrupt) TB_EXCLUDES(mutex);
  // The other of the two threads of run() or run_here().
  template <typename F>
  Thread start(F&& f) {
    if (started.exchange(true)) throw std::runtime_error("a client runs once");
    try {
      return Thread(std::forward<F>(f));
    } catch (...) {
      started = false;
      throw;
    }
  }
  bool is_stopped() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    return stopping;
  }
  void report_stuck() const;

  const EnvironmentFactory factory;
  const EnvClientOptions options;
  const Address address;

  std::atomic<bool> started{false};
  mutable Mutex mutex;
  CondVar changed;
  bool stopping TB_GUARDED_BY(mutex) = false;
  Clock::time_point give_up_at TB_GUARDED_BY(mutex) = Clock::time_point::max();
  bool done TB_GUARDED_BY(mutex) = false;
  Activity activity{nullptr};
  std::exception_ptr error TB_GUARDED_BY(mutex);
  DialledConnection* connection TB_GUARDED_BY(mutex) = nullptr;
  std::string last_error TB_GUARDED_BY(mutex);

  std::atomic<bool> connected{false};
  std::atomic<bool> finished{false};
  std::atomic<uint64_t> num_steps{0};
  std::atomic<uint64_t> num_episodes{0};
  std::atomic<uint64_t> num_reconnects{0};

  // Of the working thread alone.
  Interrupt interrupt;  // of run_here()
  uint64_t newest_number = 0;
  bool lost_before = false;
  Clock::duration downtime{};  // since the last action, without time connected
  Clock::time_point down_since = Clock::now();
  Backoff backoff;
};

// --- The working thread

void EnvClient::State::work(std::optional<uint64_t> num_episodes) {
  const End end = end_of([&] {
    const std::string stream_id = random_id();
    EnvRunner runner(factory, &activity);
    down_since = Clock::now();
    while (goes_on(run_stream(runner, stream_id, num_episodes))) {
    }
  });
  {
    MutexLock lock(mutex);
    error = end.error;
    done = true;
  }
  changed.notify_all();
}

End EnvClient::State::run_stream(EnvRunner& runner, const std::string& stream_id,
                                 std::optional<uint64_t> num_episodes) {
  DialledConnection connection(address, options.security, kJoinMethod, "the learner");
  {
    MutexLock lock(mutex);
    this->connection = &connection;  // others may cancel it
    if (stopping) connection.cancel(kUnwanted);
  }
  const AtEnd removal([this] {
    if (connected.exchange(false)) down_since = Clock::now();
    MutexLock lock(mutex);
    this->connection = nullptr;
  });
  End end = end_of([&] { play(connection, runner, stream_id, num_episodes); });
  if (end.is_own() || end.kind == End::kUnusable) connection.leave_with_error(end.text);
  return end;
}

void EnvClient::State::play(DialledConnection& connection, EnvRunner& runner,
                            const std::string& stream_id,
                            std::optional<uint64_t> num_episodes) {
  connection.open();
  const wire::AgentHello agent = connection.expect_agent_hello();
  downtime += Clock::now() - down_since;
  connected = true;
  if (!runner.has_begun()) runner.begin(agent);
  wire::EnvHello hello = runner.hello();
  hello.set_stream_id(stream_id);
  hello.set_first_step(newest_number);
  connection.introduce(std::move(hello), options.offers_memory);
  runner.send_to(connection);
  grpc::ByteBuffer action;
  uint64_t number = 0;
  while (!num_episodes || this->num_episodes < *num_episodes) {
    connection.read(&action);
    if (lost_before) ++num_reconnects;
    lost_before = false;
    downtime = {};
    backoff.reset();
    runner.step(&action, &number);
    ++newest_number;
    num_steps += static_cast<uint64_t>(runner.num_envs());
    if (runner.is_between_episodes()) ++this->num_episodes;
    runner.send_to(connection);
  }
  try {
    connection.leave();
  } catch (const TransportError&) {  // a learner that hangs may still get what was sent
    if (!connection.is_cancelled()) throw;
  }
}

bool EnvClient::State::goes_on(const End& end) {
  switch (end.kind) {
    case End::kFinished:
      finished = true;
      return false;
    case End::kLeft:
      return false;
    case End::kLost:
    case End::kRefused:
      break;
    default:
      std::rethrow_exception(end.error);
  }
  lost_before = newest_number > 0;  // not if it was never connected
  MutexLock lock(mutex);
  last_error = end.text;
  if (stopping) return false;
  if (end.kind == End::kRefused) std::rethrow_exception(end.error);
  const auto without_learner = downtime + (Clock::now() - down_since);
  if (is_longer(without_learner, options.maximum_downtime)) {
    throw TransportError("no learner for " + in_seconds(options.maximum_downtime) +
                         ": " + end.text);
  }
  const auto dial_at = Clock::now() + backoff.next();
  while (!stopping && Clock::now() < dial_at) {
    changed.wait_until(mutex, dial_at, interrupt);
  }
  return !stopping;
}

// --- The client

EnvClient::EnvClient(EnvironmentFactory factory, EnvClientOptions options)
    : state_(std::make_shared<State>(std::move(factory), std::move(options))) {}

EnvClient::~EnvClient() { stop(); }

void EnvClient::run(std::optional<uint64_t> num_episodes, const Interrupt& interrupt) {
  State& state = *state_;
  if (state.is_stopped()) return;
  Thread worker =
      state.start([owner = state_, num_episodes] { owner->work(num_episodes); });
  std::exception_ptr error;
  try {
    state.wait(interrupt);
  } catch (...) {
    error = std::current_exception();
    stop();
    state.wait(nullptr);
  }
  MutexLock lock(state.mutex);
  if (state.done) {
    worker.join();
    if (error == nullptr) error = state.error;
  } else {
    worker.detach();
    state.report_stuck();
  }
  if (error != nullptr) std::rethrow_exception(error);
}

void EnvClient::run_here(std::optional<uint64_t> num_episodes,
                         const Interrupt& interrupt) {
  State& state = *state_;
  if (state.is_stopped()) return;
  Thread watcher = state.start([owner = state_] {
    owner->wait(nullptr);
    MutexLock lock(owner->mutex);
    if (!owner->done) owner->report_stuck();
  });
  state.interrupt = interrupt;
  state.work(num_episodes);
  watcher.join();
  if (interrupt) interrupt();
  MutexLock lock(state.mutex);
  if (state.error != nullptr) {
    std::rethrow_exception(std::exchange(state.error, nullptr));
  }
}

void EnvClient::State::report_stuck() const {
  const char* const call = activity;
  std::cerr << "libtorchbeast: the client of " + address.to_string() +
                   " stopped without waiting for its environment: " +
                   (call == nullptr ? "the connection" : call) + " has not returned.\n"
            << std::flush;
}

// Until the worker is done, or is given up.
void EnvClient::State::wait(const Interrupt& interrupt) {
  MutexLock lock(mutex);
  while (!done && Clock::now() < give_up_at) {
    if (connection != nullptr && connection->is_shaking_hands()) {
      bound_dialled(2 * kMaxHelloBytes);
      connection->cancel_if_slow(options.hello_timeout, "has not answered in time");
    }
    changed.wait_until(mutex, give_up_at, interrupt);
  }
}

void EnvClient::stop(Milliseconds limit) {
  {
    MutexLock lock(state_->mutex);
    if (!state_->stopping) state_->give_up_at = time_after(limit);
    state_->stopping = true;
    if (state_->connection != nullptr) {
      state_->connection->cancel(kUnwanted);
    }
  }
  state_->changed.notify_all();
}

EnvClientStats EnvClient::stats() const {
  const State& state = *state_;
  EnvClientStats stats;
  stats.connected = state.connected;
  stats.finished = state.finished;
  stats.num_steps = state.num_steps;
  stats.num_episodes = state.num_episodes;
  stats.num_reconnects = state.num_reconnects;
  MutexLock lock(state.mutex);
  stats.last_error = state.last_error;
  return stats;
}

}  // namespace torchbeast
