// A stream's rollout in progress, and the agent's state in it: a state machine that
// waits for nothing. It knows no connection, no batcher and no queue; EnvSession moves
// data between it and them:
//
//   step --take()--> row t of the rollout --question()--> the agent
//   action() <------ row t of the rollout <--answer()---- the agent
//   after T steps: take_rollout()

#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "end.h"
#include "stream_spec.h"

namespace torchbeast {

// The rollouts of all streams together would need too much memory; says how much.
class TooManyBytes : public Ended {
 public:
  explicit TooManyBytes(const std::string& message) : Ended(End::kNoMemory, message) {}
};

// What the unrolls of a pool share. Thread-safe.
struct UnrollContext {
  const int64_t unroll_length;    // T
  const ArrayNest initial_state;  // [layers, 1 or E, ...]
  const bool named_rows;          // see ActorPoolOptions
  const uint64_t max_bytes;       // of the rollouts in progress

  MemoryPool rollout_pool{};
  MemoryPool message_pool{};

  std::atomic<uint64_t> num_steps{0};
  std::atomic<uint64_t> num_bytes{0};  // of the rollouts in progress
  std::atomic<uint64_t> bytes_copied{0};
  std::atomic<uint64_t> env_ns{0};
};

// Throws TooManyBytes if `num_streams` rollouts of such streams exceed `max_bytes`.
void check_rollout_bytes(const StreamSpec& spec, int64_t unroll_length,
                         uint64_t num_streams, uint64_t max_bytes);

// A rollout's share of UnrollContext::num_bytes, as long as it lives. One thread
// at a time.
class RolloutBytes {
 public:
  // Throws TooManyBytes.
  RolloutBytes(UnrollContext* context, const StreamSpec& spec);
  ~RolloutBytes() { context_.num_bytes -= num_bytes_; }
  RolloutBytes(const RolloutBytes&) = delete;

 private:
  UnrollContext& context_;
  uint64_t num_bytes_ = 0;
};

// One thread at a time. Owns the rollout's memory. Steps have numbers, counted by the
// environment.
//
// A step is taken whole or not at all, so an unroll may outlive its connection: while
// there is no question, it can send its action again and take the next step.
class Unroll {
 public:
  // Begins with `first` as row 0. Throws TooManyBytes; Ended, a refusal, if the initial
  // state does not fit the stream. The context must outlive it.
  Unroll(UnrollContext* context, StreamSpec spec, const EnvRow& first,
         uint64_t first_number);

  // Memory for the next step, [E, ...] each: what is read into it need not be copied.
  std::vector<Array> next_row() const { return env_row(t_ + 1); }
  // Takes the next step. REQUIRES: there is neither a question nor a whole rollout.
  void take(const EnvRow& next);
  // Environments that have just begun go on in place of others. The newest row gets
  // their observation, with each extra field that has a "final_" one, and there is a
  // question about it. All else in the row belongs to the episodes that have ended.
  // REQUIRES: is_between_episodes(), and so is `first`.
  void hand_over(const EnvRow& first, uint64_t first_number);

  // What the agent has to be asked, (row, agent_state), [1, E, ...] each; nothing once
  // the newest row has its action. The arrays are the rollout's own.
  std::optional<ArrayNest> question();
  // The answer, (outputs, new_agent_state). Throws std::invalid_argument, which says
  // what does not fit. REQUIRES: there is a question.
  void answer(ArrayNest outputs);
  // For the newest step, [E, ...] each. REQUIRES: there is no question.
  const std::vector<Array>& action() const { return action_; }
  // For the learner, [T+1, E, ...] each, once row T has its action. Row T begins the
  // next rollout.
  std::optional<ArrayNest> take_rollout();

  // Of the newest step.
  uint64_t newest_number() const { return newest_number_; }
  // Steps in the rollout that is not finished, E for each.
  int64_t num_unfinished_steps() const { return t_ * spec_.num_envs; }
  // Whether the newest step ends the episodes of all E, so that others can go on.
  bool is_between_episodes() const;

 private:
  struct Rollout {
    ArrayNest initial_state;         // of row 0, [layers, E, ...]
    std::vector<Array> env;          // [T+1, E, ...], in the wire's order
    ArrayNest rows;                  // the same, as the agent and the learner get them
    std::optional<ArrayNest> agent;  // [T+1, E, ...]
  };

  Rollout make_rollout(ArrayNest initial_state);
  void write_env_row(const EnvRow& row);
  // Copies the first `count` arrays into the newest row, unless they are there already.
  void copy_into_row(const std::vector<Array>& from, size_t count);
  void write_agent_row(Rollout& rollout, int64_t t, const ArrayNest& outputs);
  void check_form(const ArrayNest& outputs) const;
  void keep_truncation_value(const ArrayNest& outputs);
  ArrayNest final_row() const;
  std::vector<Array> action_of(const ArrayNest& outputs) const;
  std::vector<Array> env_row(int64_t t) const;  // [E, ...] each
  ArrayNest named(std::vector<Array> arrays) const;
  ArrayNest positional(std::vector<Array> arrays) const;
  ArrayNest env_nest(std::vector<Array> arrays) const {
    return context_.named_rows ? named(std::move(arrays))
                               : positional(std::move(arrays));
  }
  ArrayNest tile(const ArrayNest& state);

  UnrollContext& context_;
  const StreamSpec spec_;
  const std::vector<ArraySpec> action_specs_;  // [E, ...], with an action space
  const RolloutBytes bytes_;

  Rollout rollout_;
  int64_t t_ = 0;               // of the newest row
  uint64_t newest_number_ = 0;  // of its step
  bool acted_ = false;          // it has its action
  ArrayNest state_before_;      // the agent's, of the newest row
  ArrayNest state_after_;
  std::vector<Array> action_;              // for the newest row
  std::vector<Array> final_observation_;   // to ask about before the newest row
  std::optional<Array> truncation_value_;  // of the newest row; none: as the agent says
  bool evaluates_ = true;                  // until the agent turns out not to
};

}  // namespace torchbeast
