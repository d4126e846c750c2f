// One connection at work: its environments step, the agent answers, rollouts go to the
// learner.
//
//   env --step--> Unroll --question--> DynamicBatcher
//   env <-action- Unroll <--answer----'
//                   '--rollout [T+1, E, ...]--> BatchingQueue

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "array.h"
#include "batching.h"
#include "connection.h"
#include "stream_spec.h"
#include "sync.h"
#include "unroll.h"

namespace torchbeast {

// What the sessions of a pool share. Thread-safe.
struct SessionContext {
  const std::shared_ptr<BatchingQueue> learner_queue;
  const std::shared_ptr<DynamicBatcher> inference_batcher;
  UnrollContext unrolls;

  std::atomic<uint64_t> num_rollouts{0};
  std::atomic<int64_t> env_wait_ns{0};
  std::atomic<int64_t> inference_wait_ns{0};
  std::atomic<int64_t> queue_wait_ns{0};
};

// One thread at a time. Owns neither the connection nor the unroll, so an unroll may go
// on in another session.
//
// read_row(), send_action() and receive() throw as Connection::read; WireError;
// EnvironmentError. After these the unroll is as before the step that has failed, and
// its action can be sent again. act() throws what the queue, the batcher and
// Unroll::answer throw, and what `interrupt` throws; then the unroll is of no use any
// more.
class EnvSession {
 public:
  // After the handshake. Throws WireError if the hello breaks a rule; Ended, a refusal,
  // if no batch has room for so many environments. Both pointers must outlive it.
  // `interrupt` may end waits.
  EnvSession(SessionContext* context, Connection* connection,
             const wire::EnvHello& hello, Interrupt interrupt);

  const StreamSpec& spec() const { return spec_; }
  SessionContext& context() const { return context_; }
  Connection& connection() const { return connection_; }
  const Interrupt& interrupt() const { return interrupt_; }

  // The next step, in memory of its own. Throws TooManyBytes, before it takes any, if
  // a rollout of such steps would exceed the limit.
  EnvRow read_row();
  // Asks the agent about the newest row, if there is a question, and hands a finished
  // rollout to the learner. Returns whether there was one.
  bool act(Unroll* unroll);
  // Sends the action for the newest row.
  void send_action(Unroll* unroll);
  // Takes the next step.
  void receive(Unroll* unroll);

 private:
  EnvRow read_into(std::vector<Array> arrays);  // or into new memory, if there are none

  SessionContext& context_;
  Connection& connection_;
  uint64_t action_number_;  // of the last action
  Clock::time_point sent_at_;
  const StreamSpec spec_;
  const Interrupt interrupt_;
};

}  // namespace torchbeast
