// What the streams of an ActorPool share, and the threads that it dials from. Only the
// pool's own .cc files include this.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "actor_pool.h"
#include "connection.h"
#include "env_session.h"
#include "events.h"
#include "listener.h"
#include "sync.h"
#include "unroll.h"
#include "unroll_slots.h"

namespace torchbeast {

// Ends a stream's thread without an error.
struct Stopped {};

// Thread-safe.
struct PoolStreams : StreamHost {
  class Presence;

  PoolStreams(ActorPoolOptions options, std::shared_ptr<BatchingQueue> learner_queue,
              std::shared_ptr<DynamicBatcher> inference_batcher,
              ArrayNest initial_state)
      : options(std::move(options)),
        sessions{std::move(learner_queue),
                 std::move(inference_batcher),
                 {this->options.unroll_length, std::move(initial_state),
                  this->options.named_rows, this->options.max_rollout_bytes}},
        hellos(this->options.expected),
        num_seeded(this->options.addresses.size()) {
    const Listener* listener = this->options.listener.get();
    if (listener != nullptr) {
      slots.emplace(static_cast<size_t>(listener->max_streams()), &num_dropped_steps);
    }
    if (this->options.hello) {
      const auto& addresses = this->options.addresses;
      hellos.check(*this->options.hello,
                   addresses.empty() ? "the first environment"
                                     : "the environment server at " + addresses[0]);
    }
  }

  void close() TB_EXCLUDES(mutex) { fail(nullptr); }
  // Ends the run; the first error is the run's.
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

  void note(const std::string& error) TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    last_error = error;
  }

  // From run()'s thread.
  void cancel_all() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    for (Connection* connection : connections)
      connection->cancel("is cut off: the learner is about to end");
  }
  // Cancels connections that wait for too long, and ends the run if no environment was
  // there for too long. Time in which the process is suspended does not count.
  void check_limits() TB_EXCLUDES(mutex);
  void count_failure(const EnvironmentError& error, const std::string& address) override
      TB_EXCLUDES(mutex);
  size_t num_forgiven(const std::map<std::string, size_t>& counts) const
      TB_REQUIRES(mutex);

  // Of the next stream of the server at address `index`.
  std::optional<wire::Seeding> next_seeding(size_t index, bool is_first);

  // An environment that has joined, in its stream's thread.
  void serve(Connection& connection, const wire::EnvHello& hello) override;
  void unroll_joined(Connection& connection, const wire::EnvHello& hello);

  const ActorPoolOptions options;
  SessionContext sessions;
  HelloCheck hellos;
  std::optional<UnrollSlots> slots;  // with a listener

  std::atomic<bool> closing{false};  // written under the mutex, for sleepers
  std::atomic<bool> started{false};
  Mutex mutex;
  CondVar changed;
  std::exception_ptr first_error TB_GUARDED_BY(mutex);
  std::string last_error TB_GUARDED_BY(mutex);
  std::set<Connection*> connections TB_GUARDED_BY(mutex);
  uint64_t num_connected TB_GUARDED_BY(mutex) = 0;  // those that have sent a step
  std::map<std::string, size_t> present TB_GUARDED_BY(mutex);  // streams; see Presence
  uint64_t num_final TB_GUARDED_BY(mutex) = 0;  // servers that refuse for good
  Clock::time_point down_since TB_GUARDED_BY(mutex) = Clock::now();
  Clock::time_point checked_at TB_GUARDED_BY(mutex) = Clock::now();
  // Of the last minute: when, and the address; see count_failure.
  std::deque<std::pair<Clock::time_point, std::string>> failures TB_GUARDED_BY(mutex);
  EventLog events;

  std::atomic<uint64_t> num_seeded;  // streams
  std::atomic<uint64_t> num_reconnects{0};
  std::atomic<uint64_t> num_dropped_steps{0};
  std::atomic<uint64_t> num_refused{0};
  std::atomic<uint64_t> num_env_failures{0};
};

// One connection of a stream. While it lives, run() can cancel the connection. While
// one is present, the run does not end for lack of environments: one that has made a
// step, or one that may still make its first.
class PoolStreams::Presence {
 public:
  // Throws Stopped once the pool ends.
  // `address`: of the dialled server; empty if the environment has joined.
  Presence(PoolStreams* shared, Connection* connection, std::string address)
      : shared_(*shared), connection_(connection), address_(std::move(address)) {
    MutexLock lock(shared_.mutex);
    if (shared_.closing) throw Stopped();
    shared_.connections.insert(connection_);
  }
  ~Presence() {
    MutexLock lock(shared_.mutex);
    shared_.connections.erase(connection_);
    if (is_connected_) --shared_.num_connected;
    if (is_present_ && --shared_.present[address_] == 0)
      shared_.present.erase(address_);
    if (is_proven_) shared_.down_since = Clock::now();
  }
  Presence(const Presence&) = delete;

  // It may still make its first step.
  void trust() {
    MutexLock lock(shared_.mutex);
    come();
  }
  // Its first row is there.
  void connect() {
    MutexLock lock(shared_.mutex);
    ++shared_.num_connected;
    is_connected_ = true;
  }
  // It has made a step.
  void prove() {
    if (is_proven_) return;
    MutexLock lock(shared_.mutex);
    come();
    is_proven_ = true;
  }
  bool is_proven() const { return is_proven_; }

 private:
  void come() TB_REQUIRES(shared_.mutex) {
    if (is_present_) return;
    ++shared_.present[address_];
    is_present_ = true;
  }

  PoolStreams& shared_;
  Connection* const connection_;
  const std::string address_;
  bool is_connected_ = false;
  bool is_present_ = false;
  bool is_proven_ = false;
};

// Runs the streams of one server, one after the other, until the pool ends. Blocks;
// throws nothing.
void run_dialled(PoolStreams* shared, size_t index);

}  // namespace torchbeast
