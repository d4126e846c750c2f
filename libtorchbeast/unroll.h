// One unroll: a stream's rollout in progress and the agent's state in it. It belongs to
// no connection, and may go on over several.
//
//   env --step--> row t of the rollout --inputs--> DynamicBatcher
//   env <-action------- row t of the rollout <--outputs--'
//   after T steps: rollout [T+1, E, ...] --> BatchingQueue

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "array.h"
#include "batching.h"
#include "connection.h"
#include "sync.h"
#include "wire.h"

namespace torchbeast {

// What the unrolls of a pool share.
struct UnrollContext {
  UnrollContext(int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
                std::shared_ptr<DynamicBatcher> inference_batcher,
                ArrayNest initial_state)
      : unroll_length(unroll_length),
        learner_queue(std::move(learner_queue)),
        inference_batcher(std::move(inference_batcher)),
        initial_state(std::move(initial_state)) {}

  const int64_t unroll_length;  // T
  const std::shared_ptr<BatchingQueue> learner_queue;
  const std::shared_ptr<DynamicBatcher> inference_batcher;
  const ArrayNest initial_state;  // [layers, 1 or E, ...]

  MemoryPool rollout_pool;
  MemoryPool message_pool;

  std::atomic<uint64_t> num_steps{0};
  std::atomic<uint64_t> num_rollouts{0};
  std::atomic<uint64_t> bytes_received{0};
  std::atomic<uint64_t> bytes_copied{0};
  std::atomic<uint64_t> env_ns{0};
  std::atomic<uint64_t> env_wait_ns{0};
  std::atomic<uint64_t> inference_wait_ns{0};
  std::atomic<uint64_t> queue_wait_ns{0};
};

// A step as it comes, arrays [E, ...].
struct EnvRow {
  std::vector<Array> arrays;             // as StreamSpec::arrays
  std::vector<Array> final_observation;  // empty, or as the observation's
  uint64_t env_nanoseconds = 0;
};

// Reads a stream's next step into `arrays`, or into new memory if there are none.
// Throws as Connection::read, WireError, EnvironmentError.
EnvRow read_row(Connection& connection, const StreamSpec& spec, UnrollContext& context,
                std::vector<Array> arrays = {});

// Whether it is the first row of new episodes for all E.
bool is_between_episodes(const StreamSpec& spec, const EnvRow& row);

// A row is taken whole or not at all: after a TransportError or WireError the unroll is
// as before the step that has failed, and its action can be sent again. What else is
// thrown comes from inference, the queue or the interrupt, and ends it.
//
// Steps have numbers, counted by the environment.
class Unroll {
 public:
  // Begins with `first`, asks for an action. `interrupt` may end waits.
  Unroll(UnrollContext* context, StreamSpec spec, const EnvRow& first,
         uint64_t first_number, Interrupt interrupt);

  // The newest step taken, whose action goes out next.
  uint64_t newest_number() const { return newest_number_; }
  // Steps in the rollout that is not finished, E for each.
  int64_t num_unfinished_steps() const { return t_ * spec_.num_envs; }
  // Whether the newest step ends the episodes of all E, so that others can go on.
  bool is_between_episodes() const;

  // Sends the action for the newest step, takes the next, asks for its action. Returns
  // whether a rollout is finished with it.
  bool step(Connection& connection);
  // The same where the next step has come already.
  bool take(const EnvRow& next);
  // REQUIRES: is_between_episodes(), and so is `first`. Environments go on that have
  // just begun: the newest row gets their observation, in place of that of the ones
  // that have left, and a new action. All else in it belongs to the ended episodes.
  void hand_over(const EnvRow& first, uint64_t first_number);

 private:
  struct Rollout {
    ArrayNest initial_state;         // of row 0, [layers, E, ...]
    std::vector<Array> env;          // [T+1, E, ...], in the wire's order
    std::optional<ArrayNest> agent;  // [T+1, E, ...]
  };

  bool advance(const std::vector<Array>& final_observation, uint64_t env_nanoseconds);
  void answer(const std::vector<Array>& final_observation);
  void act();
  ArrayNest compute(ArrayNest env_outputs);
  std::optional<Array> evaluate(const std::vector<Array>& final_observation);
  void write_agent_row(Rollout& rollout, int64_t t, const ArrayNest& outputs);
  std::vector<Array> action_of(const ArrayNest& outputs) const;
  Rollout make_rollout(ArrayNest initial_state);
  void copy_row(const Rollout& from, int64_t from_row, Rollout& to, int64_t to_row);
  void finish_rollout();
  std::vector<Array> env_row(int64_t t) const;       // [E, ...] each
  std::vector<Array> env_time_row(int64_t t) const;  // [1, E, ...] each
  ArrayNest env_nest(std::vector<Array> arrays) const;
  ArrayNest tile(const ArrayNest& state);

  UnrollContext& context_;
  const StreamSpec spec_;
  const Interrupt interrupt_;

  Rollout rollout_;
  int64_t t_ = 0;               // of the newest row
  uint64_t newest_number_ = 0;  // of its step
  ArrayNest state_before_;      // the agent's, of the newest row
  ArrayNest state_after_;
  std::vector<Array> action_;              // for the newest row
  std::optional<Array> truncation_value_;  // of the newest row; none: as the agent says
  bool evaluates_ = true;                  // until the agent turns out not to
};

}  // namespace torchbeast
