// The streams of an ActorPool, and what they share. Only the pool's own files include
// this.

#pragma once

#include <atomic>
#include <cstddef>
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

// Streams that are dialled have threads of their own (dialled_streams.h), and those
// that have joined the listener's (joined_streams.cc). They report here what happens to
// them, and end once is_closing(). run() waits for them all.
//
// Thread-safe. Lives as long as run() and all streams.
class PoolStreams : public StreamHost {
 public:
  class Presence;

  // As ActorPool's, whose arguments have been checked.
  PoolStreams(ActorPoolOptions options, std::shared_ptr<BatchingQueue> learner_queue,
              std::shared_ptr<DynamicBatcher> inference_batcher,
              ArrayNest initial_state);

  // --- ActorPool's methods

  void run() TB_EXCLUDES(mutex_);
  void close() TB_EXCLUDES(mutex_);
  ActorPoolStats stats() const TB_EXCLUDES(mutex_);

  // --- For the streams. These are constant, or thread-safe by themselves.

  const ActorPoolOptions options;
  SessionContext sessions;
  HelloCheck hellos;
  EventLog events;
  std::atomic<uint64_t> num_dropped_steps{0};
  std::atomic<uint64_t> num_refused{0};

  bool is_closing() const { return closing_; }
  // Ends the run; the first error of this side is the run's. It may come while the run
  // ends already: who fails may close the queues at once.
  void end(std::exception_ptr error = nullptr) TB_EXCLUDES(mutex_);
  // After a dialled stream: sleeps so long, and until the check has seen what has
  // happened, but not beyond close().
  void pause(Milliseconds time) TB_EXCLUDES(mutex_);
  // Why a stream was lost or refused.
  void note(const std::string& error) TB_EXCLUDES(mutex_);
  void note_return(const Connection& connection);
  // A server has begun to refuse for good, or does so no longer.
  void count_refusing(bool refuses) TB_EXCLUDES(mutex_);
  void count_failure(const std::string& text, const std::string& origin) override
      TB_EXCLUDES(mutex_);
  // Of the next stream of the server at address `index`.
  std::optional<wire::Seeding> next_seeding(size_t index, bool is_first);

 private:
  using Peers = decltype(PoolFacts::peers);

  // An environment that has joined, in its stream's thread.
  End serve(Connection& connection, const wire::EnvHello& hello) override;
  End unroll_joined(Connection& connection, const wire::EnvHello& hello);
  void cancel_all() TB_EXCLUDES(mutex_);
  // Gives up connections that wait for too long, and the unrolls of environments that
  // are away for too long, until the pool ends. In a thread of its own: the check may
  // wait for long, for Python's lock.
  void keep_limits() TB_EXCLUDES(mutex_);
  // What has happened.
  PoolFacts look() TB_EXCLUDES(mutex_);
  // The check has seen it. Waits until the next look is due.
  void wait_for_news() TB_EXCLUDES(mutex_);

  std::optional<UnrollSlots> slots_;  // with a listener
  std::atomic<uint64_t> num_seeded_;  // streams
  std::atomic<uint64_t> num_reconnects_{0};
  std::atomic<uint64_t> num_env_failures_{0};

  std::atomic<bool> closing_{false};  // written under the mutex, for sleepers
  std::atomic<bool> started_{false};
  mutable Mutex mutex_;
  CondVar changed_;   // wakes those that pause
  CondVar has_news_;  // wakes run()
  bool is_wanted_ TB_GUARDED_BY(mutex_) = true;
  std::exception_ptr first_error_ TB_GUARDED_BY(mutex_);
  std::string last_error_ TB_GUARDED_BY(mutex_);
  std::set<Presence*> streams_ TB_GUARDED_BY(mutex_);
  uint64_t num_connected_ TB_GUARDED_BY(mutex_) = 0;  // those that have sent a step
  uint64_t num_refusing_ TB_GUARDED_BY(mutex_) = 0;   // servers, for good
  Clock::time_point limits_kept_at_ TB_GUARDED_BY(mutex_);
  // Since the last look: whether the process was suspended; streams that have ended,
  // and failures.
  bool was_suspended_ TB_GUARDED_BY(mutex_) = false;
  Peers peers_ TB_GUARDED_BY(mutex_);
  std::string last_failure_ TB_GUARDED_BY(mutex_);
  uint64_t num_news_ TB_GUARDED_BY(mutex_) = 0;    // dialled streams that have ended
  uint64_t num_looked_ TB_GUARDED_BY(mutex_) = 0;  // of these, before the last look
  uint64_t num_seen_ TB_GUARDED_BY(mutex_) = 0;    // of these, known to the check
};

// One connection of a stream. While it lives, run() can cancel the connection, and
// reports what the stream has done. One thread at a time, but for what says otherwise.
class PoolStreams::Presence {
 public:
  // Throws once the pool ends.
  Presence(PoolStreams* shared, Connection* connection)
      : shared_(*shared), connection_(*connection) {
    MutexLock lock(shared_.mutex_);
    if (shared_.closing_) throw_over();
    Peers own{{connection->origin(), {}}};
    peer_ = own.extract(own.begin());
    shared_.streams_.insert(this);
  }
  ~Presence() {
    MutexLock lock(shared_.mutex_);
    shared_.streams_.erase(this);
    if (is_connected_) --shared_.num_connected_;
    if (!is_proven_) return;
    shared_.peers_.insert(std::move(peer_)).position->second.proven_at = Clock::now();
  }
  Presence(const Presence&) = delete;

  // It may still make its first step.
  void trust() { is_present_ = true; }
  // Its first row is there.
  void connect() {
    MutexLock lock(shared_.mutex_);
    ++shared_.num_connected_;
    is_connected_ = true;
  }
  // It has made a step; `finished`: and given a rollout.
  void step(bool finished) {
    if (!is_proven_) is_present_ = is_proven_ = true;
    if (finished) has_delivered_ = true;
  }
  // It ends by a fault of its own: its rollouts no longer speak for it.
  void fail() { has_delivered_ = false; }

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
