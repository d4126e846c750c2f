// Runs sessions whose messages go through shared memory: all of this process in one
// thread.
//
//   env --step--> the collector's thread: Unroll --question--> DynamicBatcher
//   env <-action- the inference thread:   Unroll <--answer----'
//   (if there is no room for a rollout: the thread that makes room sends it)
//
// The collector takes the steps that are there and asks the agent about them. Who
// answers, or makes room, sends the actions. What may block comes back: the first step,
// and the end.

#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "env_session.h"
#include "sync.h"
#include "unroll.h"

namespace torchbeast {

// The one of this process, which has a thread while there are sessions. Thread-safe.
class Collector {
 public:
  // Called after each step, in any thread, but one at a time for each session; with
  // whether a rollout is finished.
  using OnStep = std::function<void(bool)>;
  // Called once, in any thread, when the session comes back, after which nobody here
  // touches it or the unroll: with an error of this side, what its `interrupt` has
  // thrown, or null: then EnvSession::receive() says why no step comes, or there is one
  // after all. Must neither block nor throw.
  using OnBack = std::function<void(std::exception_ptr)>;

  static Collector& instance();
  Collector(const Collector&) = delete;

  // Steps the environments of a session, whose connection has a lane, until it comes
  // back. Calls `interrupt` of the session every kInterruptPeriod, with a lock held: it
  // must be there, and must not wait. A rollout that has no room when the session comes
  // back may still reach the learner.
  // Throws std::runtime_error if the system refuses a thread; then on_back is not
  // called. REQUIRES: the newest row has its action.
  void start(EnvSession* session, Unroll* unroll, OnStep on_step, OnBack on_back)
      TB_EXCLUDES(mutex_);

 private:
  class Running;
  using RunningList = std::vector<std::shared_ptr<Running>>;

  Collector() = default;
  void add(const std::shared_ptr<Running>& running) TB_EXCLUDES(mutex_);
  void remove(const Running* running) TB_EXCLUDES(mutex_);
  void collect() TB_EXCLUDES(mutex_);

  Mutex mutex_;
  // Copied by the collector's thread if its version has changed.
  RunningList running_ TB_GUARDED_BY(mutex_);
  std::atomic<uint64_t> version_{0};
  bool has_thread_ TB_GUARDED_BY(mutex_) = false;
};

}  // namespace torchbeast
