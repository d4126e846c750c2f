// What the streams of an ActorPool share. Only the pool's own files include this.

#pragma once

#include <atomic>
#include <cstdint>
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

// Thread-safe: each member is constant, atomic, thread-safe by itself, or guarded by
// the mutex. Lives as long as run() and all streams.
struct PoolStreams : StreamHost {
  class Presence;
  using Peers = decltype(PoolFacts::peers);

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
      hellos.check(*this->options.hello, "the first environment");
    }
  }

  // Ends the run; the first error of this side is the run's. It may come while the run
  // ends already: who fails may close the queues at once.
  void end(std::exception_ptr error = nullptr) TB_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      if (is_wanted && first_error == nullptr) first_error = std::move(error);
      closing = true;
    }
    changed.notify_all();
    has_news.notify_all();
  }

  // The caller ends it: what fails from here on is no error.
  void close() TB_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      is_wanted = false;
    }
    end();
  }

  // After a dialled stream: sleeps so long, and until the check has seen what has
  // happened, but not beyond close().
  void pause(Milliseconds time) TB_EXCLUDES(mutex) {
    const auto end = Clock::now() + time;
    MutexLock lock(mutex);
    const uint64_t number = ++num_news;
    has_news.notify_all();
    while (!closing) {
      const auto now = Clock::now();
      if (now >= end && num_seen >= number) return;
      changed.wait_until(mutex, now < end ? end : now + kInterruptPeriod, nullptr);
    }
  }

  void note(const std::string& error) TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    last_error = error;
  }
  void note_return(const Connection& connection) {
    ++num_reconnects;
    events.add(Event::kReturned, connection.peer());
  }

  // From run()'s thread.
  void cancel_all() TB_EXCLUDES(mutex);
  // Gives up connections that wait for too long, and the unrolls of environments that
  // are away for too long, until the pool ends. In a thread of its own: the check may
  // wait for long, for Python's lock.
  void keep_limits() TB_EXCLUDES(mutex);
  // From run()'s thread: what has happened.
  PoolFacts look() TB_EXCLUDES(mutex);
  // The check has seen it. Waits until the next look is due.
  void wait_for_news() TB_EXCLUDES(mutex);
  void count_failure(const std::string& text, const std::string& origin) override
      TB_EXCLUDES(mutex) {
    ++num_env_failures;
    MutexLock lock(mutex);
    ++peers[origin].num_failures;
    last_failure = text;
  }

  // Of the next stream of the server at address `index`.
  std::optional<wire::Seeding> next_seeding(size_t index, bool is_first);

  // An environment that has joined, in its stream's thread.
  End serve(Connection& connection, const wire::EnvHello& hello) override;
  End unroll_joined(Connection& connection, const wire::EnvHello& hello);

  const ActorPoolOptions options;
  SessionContext sessions;
  HelloCheck hellos;
  std::optional<UnrollSlots> slots;  // with a listener

  std::atomic<bool> closing{false};  // written under the mutex, for sleepers
  std::atomic<bool> started{false};
  Mutex mutex;
  CondVar changed;   // wakes those that pause, and who waits for a stream to be back
  CondVar has_news;  // wakes run()
  bool is_wanted TB_GUARDED_BY(mutex) = true;
  std::exception_ptr first_error TB_GUARDED_BY(mutex);
  std::string last_error TB_GUARDED_BY(mutex);
  std::set<Presence*> streams TB_GUARDED_BY(mutex);
  uint64_t num_connected TB_GUARDED_BY(mutex) = 0;  // those that have sent a step
  uint64_t num_refusing TB_GUARDED_BY(mutex) = 0;   // servers, for good
  Clock::time_point limits_kept_at TB_GUARDED_BY(mutex);
  // Since the last look: whether the process was suspended; streams that have ended,
  // and failures.
  bool was_suspended TB_GUARDED_BY(mutex) = false;
  Peers peers TB_GUARDED_BY(mutex);
  std::string last_failure TB_GUARDED_BY(mutex);
  uint64_t num_news TB_GUARDED_BY(mutex) = 0;    // dialled streams that end or are back
  uint64_t num_looked TB_GUARDED_BY(mutex) = 0;  // of these, before the last look
  uint64_t num_seen TB_GUARDED_BY(mutex) = 0;    // of these, known to the check
  EventLog events;

  std::atomic<uint64_t> num_seeded;  // streams
  std::atomic<uint64_t> num_reconnects{0};
  std::atomic<uint64_t> num_dropped_steps{0};
  std::atomic<uint64_t> num_refused{0};
  std::atomic<uint64_t> num_env_failures{0};
};

// One connection of a stream. While it lives, run() can cancel the connection, and
// reports what the stream has done.
class PoolStreams::Presence {
 public:
  // Throws once the pool ends.
  Presence(PoolStreams* shared, Connection* connection)
      : shared_(*shared), connection_(*connection) {
    MutexLock lock(shared_.mutex);
    if (shared_.closing) throw_over();
    Peers own{{connection->origin(), {}}};
    peer_ = own.extract(own.begin());
    shared_.streams.insert(this);
  }
  ~Presence() {
    MutexLock lock(shared_.mutex);
    shared_.streams.erase(this);
    if (is_connected_) --shared_.num_connected;
    if (!is_proven_) return;
    shared_.peers.insert(std::move(peer_)).position->second.proven_at = Clock::now();
  }
  Presence(const Presence&) = delete;

  // It may still make its first step.
  void trust() { is_present_ = true; }
  // Its first row is there.
  void connect() {
    MutexLock lock(shared_.mutex);
    ++shared_.num_connected;
    is_connected_ = true;
  }
  // It has made a step; `finished`: and given a rollout.
  void step(bool finished) {
    if (!is_proven_) is_present_ = is_proven_ = true;
    if (finished) has_delivered_ = true;
  }
  bool is_proven() const { return is_proven_; }
  // It ends by a fault of its own: its rollouts no longer speak for it.
  void fail() { has_delivered_ = false; }
  // It has ended, and nobody has time for it.
  void rest() { is_present_ = is_proven_ = has_delivered_ = false; }

  Connection& connection() { return connection_; }
  // Adds what is so at this time. Thread-safe.
  void add_to(PoolFacts::Peer* peer, Clock::time_point time) const {
    peer->is_present |= is_present_;
    peer->has_delivered |= has_delivered_;
    if (is_proven_) peer->proven_at = time;
  }

 private:
  PoolStreams& shared_;
  Connection& connection_;
  Peers::node_type peer_;  // made in time: the destructor must not ask for memory
  bool is_connected_ = false;
  std::atomic<bool> is_present_{false};
  std::atomic<bool> is_proven_{false};
  std::atomic<bool> has_delivered_{false};
};

}  // namespace torchbeast
