// Runs sessions until they end. All whose messages go through shared memory share one
// thread of this process, the collector:
//
//   env --step--> the collector's thread: Unroll --question--> DynamicBatcher
//   env <-action- the inference thread:   Unroll <--answer----'
//   (if there is no room for a rollout: the thread that makes room sends it)
//
// It takes the steps that are there and asks the agent about them. Who answers, or
// makes room, sends the actions. What may block is done in the stream's own thread: the
// first step, and the end.

#pragma once

#include <functional>

#include "env_session.h"
#include "unroll.h"

namespace torchbeast {

// Called after each step, in any thread, but one at a time for each session; with
// whether a rollout is finished.
using OnStep = std::function<void(bool)>;

// Steps the environments of a session, in this thread if its connection has no lane.
// Never returns: throws how that ends, as EnvSession's methods do, and what the
// session's `interrupt` throws. The collector calls that every kInterruptPeriod, with a
// lock held: it must be there, and must not wait. A rollout that has no room at the end
// may still reach the learner.
[[noreturn]] void run_session(EnvSession& session, Unroll& unroll,
                              const OnStep& on_step);

}  // namespace torchbeast
