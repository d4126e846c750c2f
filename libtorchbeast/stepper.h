// An environment as a stream sees it: actions come as messages, steps go as messages.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "array.h"
#include "environment.h"
#include "wire.h"

namespace torchbeast {

// One thread at a time, but for the activity. What the environment throws comes
// through.
class Stepper {
 public:
  // Makes an environment. Keeps `activity` up to date until it is destroyed.
  Stepper(const EnvironmentFactory& factory, Activity* activity);
  ~Stepper();  // destroys the environment
  Stepper(const Stepper&) = delete;

  // Seeds the environment, if `agent` says how, and resets it. What follows is only for
  // one that has begun.
  void begin(const wire::AgentHello& agent);
  bool has_begun() const { return !spec_.arrays.empty(); }

  const wire::EnvHello& hello() const { return environment_->hello(); }
  int64_t num_envs() const { return spec_.num_envs; }
  // The step made last, first that of the reset; it may be sent any number of times.
  const grpc::ByteBuffer& newest_step() const { return newest_step_; }
  uint64_t newest_bytes_copied() const { return newest_bytes_copied_; }
  // Whether new episodes begin with it for all E.
  bool is_between_episodes() const;
  // Makes a step. Throws WireError if the message is not an action for it; then none is
  // made.
  void step(grpc::ByteBuffer* action);

 private:
  void encode_row(Clock::time_point start);

  Activity& activity_;
  std::unique_ptr<Environment> environment_;
  StreamSpec spec_;
  MemoryPool pool_;
  Environment::Row row_;
  grpc::ByteBuffer newest_step_;
  uint64_t newest_bytes_copied_ = 0;
  std::vector<ArraySpec> action_specs_;
  std::vector<Array> action_;
  Destination action_destination_;
};

}  // namespace torchbeast
