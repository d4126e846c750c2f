// An environment as a stream sees it: actions come as messages, steps go as messages.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "array.h"
#include "codec.h"
#include "connection.h"
#include "environment.h"

namespace torchbeast {

// Owns the environment, whose exceptions pass through. One thread at a time, but for
// the activity.
class EnvRunner {
 public:
  // Makes an environment. Keeps `activity` up to date until it is destroyed.
  EnvRunner(const EnvironmentFactory& factory, Activity* activity);
  ~EnvRunner();  // destroys the environment
  EnvRunner(const EnvRunner&) = delete;

  // Seeds the environment, if `agent` says how, and resets it.
  void begin(const wire::AgentHello& agent);
  bool has_begun() const { return !spec_.arrays.empty(); }

  // --- REQUIRES: begin() has returned

  const wire::EnvHello& hello() const { return environment_->hello(); }
  int64_t num_envs() const { return spec_.num_envs; }
  // Sends the newest step, at first that of the reset, any number of times.
  void send_to(Connection& connection) { connection.write(step_message(row_), pool_); }
  size_t step_bytes() const { return spec_.step_bytes; }
  // Whether the newest step begins new episodes for all E.
  bool is_between_episodes() const {
    return torchbeast::is_between_episodes(spec_, row_.arrays);
  }
  // Makes a step. Throws WireError, and makes none, if the message is not an action for
  // this environment, or not the next: *number is that of the connection's last action,
  // at first 0.
  void step(grpc::ByteBuffer* action, uint64_t* number);

 private:
  void finish_row(Clock::time_point start);

  Activity& activity_;
  std::unique_ptr<Environment> environment_;
  StreamSpec spec_;
  MemoryPool pool_;
  EnvRow row_;
  std::vector<Array> action_;
};

}  // namespace torchbeast
