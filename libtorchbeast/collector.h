// Runs sessions whose messages go through shared memory: all of this process in one
// thread.
//
//   env --step--> the collector's thread: Unroll --question--> DynamicBatcher
//   env <-action- the inference thread:   Unroll <--answer----'
//
// The collector takes the steps that are there and asks the agent about them. Who
// answers, sends the actions. What may block stays in the thread of the stream: the
// first step, a learner that has no room for a rollout, and the end.

#pragma once

#include <atomic>
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

  static Collector& instance();
  Collector(const Collector&) = delete;

  // Steps the environments of a session, whose connection has a lane, until it ends.
  // Blocks. Throws why, as EnvSession does. REQUIRES: the newest row has its action.
  void run(EnvSession* session, Unroll* unroll, const OnStep& on_step)
      TB_EXCLUDES(mutex_);

 private:
  struct Running;
  using RunningList = std::vector<std::shared_ptr<Running>>;

  Collector() = default;
  void add(const std::shared_ptr<Running>& running) TB_EXCLUDES(mutex_);
  void remove(const std::shared_ptr<Running>& running) TB_EXCLUDES(mutex_);
  void collect() TB_EXCLUDES(mutex_);

  Mutex mutex_;
  // Copied by the collector's thread if its version has changed.
  RunningList running_ TB_GUARDED_BY(mutex_);
  std::atomic<uint64_t> version_{0};
  bool has_thread_ TB_GUARDED_BY(mutex_) = false;
};

}  // namespace torchbeast
