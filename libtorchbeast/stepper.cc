#include "stepper.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "sync.h"

namespace torchbeast {

namespace {

// Until the end of the scope, the environment is in this method.
class During {
 public:
  During(Activity* activity, const char* method) : activity_(*activity) {
    activity_.store(method, std::memory_order_relaxed);
  }
  ~During() { activity_.store(nullptr, std::memory_order_relaxed); }
  During(const During&) = delete;

 private:
  Activity& activity_;
};

}  // namespace

Stepper::Stepper(const EnvironmentFactory& factory, Activity* activity)
    : activity_(*activity) {
  const During making(&activity_, "env_class()");
  environment_ = factory();
}

Stepper::~Stepper() {
  const During closing(&activity_, "close()");
  environment_ = nullptr;
}

void Stepper::begin(const wire::AgentHello& agent) {
  const During resetting(&activity_, "reset()");
  if (agent.has_seeding()) environment_->seed(agent.seeding());
  const auto start = Clock::now();
  row_ = environment_->reset();
  try {
    spec_ = StreamSpec(environment_->hello());
  } catch (const WireError& error) {  // ours, not the peer's
    throw std::runtime_error(std::string("this environment can't be served: ") +
                             error.what());
  }
  encode_row(start);
  action_specs_ = spec_.action.flatten();
  for (const ArraySpec& spec : action_specs_) action_.push_back(pool_.allocate(spec));
  action_destination_ = spec_.has_action ? expect(action_specs_, action_, "action")
                                         : accept_any(spec_.num_envs, pool_, &action_);
}

bool Stepper::is_between_episodes() const {
  const Array& done = row_.arrays[spec_.num_observation_arrays + kDoneField];
  return std::all_of(done.data(), done.data() + spec_.num_envs,
                     [](uint8_t done) { return done != 0; });
}

void Stepper::step(grpc::ByteBuffer* action) {
  if (!spec_.has_action) action_.clear();
  const Decoded decoded = decode_agent_message(action, action_destination_);
  if (decoded.kind != Decoded::kAction) throw WireError("a second hello");
  if (decoded.num_arrays != action_.size() || action_.empty()) {
    throw WireError("an action of " + std::to_string(decoded.num_arrays) +
                    " arrays, where the action space has " +
                    std::to_string(spec_.has_action ? action_.size() : 1));
  }
  const During stepping(&activity_, "step()");
  const auto start = Clock::now();
  row_ = environment_->step(action_);
  encode_row(start);
}

void Stepper::encode_row(Clock::time_point start) {
  const std::chrono::nanoseconds duration = Clock::now() - start;
  const auto changed = [](const std::string& how) {
    throw std::runtime_error("the environment's rows have changed: " + how);
  };
  if (row_.arrays.size() != spec_.arrays.size()) {
    changed(std::to_string(row_.arrays.size()) + " arrays, not " +
            std::to_string(spec_.arrays.size()));
  }
  newest_bytes_copied_ = 0;
  for (size_t i = 0; i < row_.arrays.size(); ++i) {
    if (row_.arrays[i].spec() != spec_.arrays[i]) {
      changed("array " + std::to_string(i) + " is " +
              row_.arrays[i].spec().to_string() + ", not " +
              spec_.arrays[i].to_string());
    }
    newest_bytes_copied_ += row_.arrays[i].num_bytes();
  }
  newest_step_.Clear();  // its memory is used again for the next
  newest_step_ = encode_step(row_.arrays, row_.final_observation, pool_,
                             static_cast<uint64_t>(duration.count()));
}

}  // namespace torchbeast
