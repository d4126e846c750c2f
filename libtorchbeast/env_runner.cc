#include "env_runner.h"

#include <string>

#include "codec.h"
#include "sync.h"

namespace torchbeast {

namespace {

// As long as this lives, the environment is in this method.
auto during(Activity* activity, const char* method) {
  activity->store(method, std::memory_order_relaxed);
  return AtEnd([=] { activity->store(nullptr, std::memory_order_relaxed); });
}

}  // namespace

EnvRunner::EnvRunner(const EnvironmentFactory& factory, Activity* activity)
    : activity_(*activity) {
  const auto making = during(&activity_, "env_class()");
  environment_ = factory();
}

EnvRunner::~EnvRunner() {
  const auto closing = during(&activity_, "close()");
  environment_ = nullptr;
}

void EnvRunner::begin(const wire::AgentHello& agent) {
  const auto resetting = during(&activity_, "reset()");
  if (agent.has_seeding()) environment_->seed(agent.seeding());
  const auto start = Clock::now();
  try {
    row_ = environment_->reset();
    spec_ = StreamSpec(environment_->hello());
    wire::EnvMessage message;
    *message.mutable_hello() = environment_->hello();
    // Throws if it is too large for the learner.
    encode(message);
  } catch (const WireError& error) {  // ours, not the peer's
    throw UnusableEnvironment(error.what());
  }
  finish_row(start);
  if (!spec_.has_action_space) return;
  spec_.action.for_each(
      [this](const ArraySpec& spec) { action_.push_back(pool_.allocate(spec)); });
}

void EnvRunner::step(grpc::ByteBuffer* action, uint64_t* number) {
  const uint64_t next =
      spec_.has_action_space
          ? decode_action(action, action_)
          : decode_action_with_layout(action, spec_.num_envs, pool_, &action_);
  if (next == 0 || (*number != 0 && next != *number + 1)) {
    refuse("action", "its number is " + std::to_string(next) +
                         ", and that of the last " + std::to_string(*number) +
                         "; the next must be 1 more, and the "
                         "first at least 1");
  }
  *number = next;
  const auto stepping = during(&activity_, "step()");
  const auto start = Clock::now();
  row_ = environment_->step(action_);
  row_.action_number = next;
  finish_row(start);
}

void EnvRunner::finish_row(Clock::time_point start) {
  const std::chrono::nanoseconds duration = Clock::now() - start;
  row_.env_nanoseconds = static_cast<uint64_t>(duration.count());
}

}  // namespace torchbeast
