#include "env_session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "codec.h"

namespace torchbeast {

namespace {

// What ends an episode has to say so in "done": only that resets the agent's state and
// the discount.
void check_ends(const StreamSpec& spec, const std::vector<Array>& arrays) {
  const uint8_t* const done = arrays[spec.num_observation_arrays + kDoneField].data();
  for (const std::optional<size_t> field : {spec.truncated, spec.game_over}) {
    for (size_t e = 0; field && e < static_cast<size_t>(spec.num_envs); ++e) {
      if (arrays[*field].data()[e] != 0 && done[e] == 0) {
        throw WireError(spec.names[*field] +
                        " is true and done is false in environment " +
                        std::to_string(e));
      }
    }
  }
}

// Also gives the other environments' rows, which may be anything, their observations.
void check_final_observation(const StreamSpec& spec, const EnvRow& row) {
  const bool is_due = any_truncated(spec, row.arrays);
  if (row.final_observation.empty() == is_due) {
    throw WireError(is_due
                        ? "final_observation is missing, and an episode is truncated"
                        : "final_observation has bytes, and no episode is truncated");
  }
  for (size_t i = 0; i < row.final_observation.size(); ++i) {
    const uint8_t* const truncated = row.arrays[*spec.truncated].data();
    const Array &from = row.arrays[i], &to = row.final_observation[i];
    const size_t bytes = to.num_bytes() / static_cast<size_t>(spec.num_envs);
    for (size_t e = 0; e < static_cast<size_t>(spec.num_envs) && bytes > 0; ++e) {
      if (truncated[e] != 0) continue;
      std::memcpy(to.data() + e * bytes, from.data() + e * bytes, bytes);
    }
  }
  try {
    check_values(spec, row.final_observation);
  } catch (const WireError& error) {
    throw WireError(std::string("final_observation: ") + error.what());
  }
}

}  // namespace

EnvSession::EnvSession(SessionContext* context, Connection* connection,
                       const wire::EnvHello& hello, Interrupt interrupt)
    : context_(*context),
      connection_(*connection),
      action_number_(std::random_device()() % (1U << 31)),
      spec_(hello),
      interrupt_(std::move(interrupt)) {
  const int64_t most = std::min(context_.learner_queue->maximum_batch_size(),
                                context_.inference_batcher->maximum_batch_size());
  if (spec_.num_envs <= most) return;
  throw Ended(End::kRefused, std::to_string(spec_.num_envs) +
                                 " environments in a stream, and the learner's "
                                 "batches have at most " +
                                 std::to_string(most) +
                                 "; raise maximum_batch_size, or serve fewer");
}

EnvRow EnvSession::read_row() {
  const UnrollContext& unrolls = context_.unrolls;
  check_rollout_bytes(spec_, unrolls.unroll_length, 1, unrolls.max_bytes);
  EnvRow row = read_into({});
  row.env_nanoseconds = 0;  // nobody has waited for it
  return row;
}

EnvRow EnvSession::read_into(std::vector<Array> arrays) {
  grpc::ByteBuffer message;
  connection_.read(&message);
  EnvRow row;
  row.arrays = std::move(arrays);
  const std::optional<std::string> error =
      decode_step(&message, spec_, context_.unrolls.message_pool, &row);
  if (error) throw EnvironmentError(connection_.peer() + " failed:\n" + *error);
  check_values(spec_, row.arrays);
  check_ends(spec_, row.arrays);
  check_final_observation(spec_, row);
  context_.unrolls.bytes_copied += spec_.step_bytes;
  return row;
}

bool EnvSession::act(Unroll* unroll) {
  while (std::optional<ArrayNest> question = unroll->question()) {
    Stopwatch stopwatch(context_.inference_wait_ns);
    unroll->answer(
        context_.inference_batcher->compute(std::move(*question), interrupt_));
  }
  std::optional<ArrayNest> rollout = unroll->take_rollout();
  if (!rollout) return false;
  const Stopwatch stopwatch(context_.queue_wait_ns);
  context_.learner_queue->enqueue(std::move(*rollout), interrupt_);
  ++context_.num_rollouts;
  return true;
}

void EnvSession::send_action(Unroll* unroll) {
  sent_at_ = Clock::now();
  connection_.write(
      action_message(unroll->action(), ++action_number_, !spec_.has_action_space),
      context_.unrolls.message_pool);
}

void EnvSession::receive(Unroll* unroll) {
  EnvRow next = read_into(unroll->next_row());
  const auto waited =
      static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - sent_at_).count());
  context_.env_wait_ns += waited;
  next.env_nanoseconds = std::min(next.env_nanoseconds, waited);  // the peer says it
  if (next.action_number != action_number_) {
    throw WireError("the step answers action " + std::to_string(next.action_number) +
                    ", and the last action is " + std::to_string(action_number_) +
                    ": wait for each action, and return its number in the step that it "
                    "leads to");
  }
  unroll->take(next);
}

}  // namespace torchbeast
