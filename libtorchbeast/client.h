// Dials the learner and runs one environment (of E) there: for environments behind NAT,
// or such that come and go. The learner listens, see listener.h.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "environment.h"
#include "sync.h"
#include "transport.h"

namespace torchbeast {

struct EnvClientOptions {
  std::string address;  // the learner's
  Security security;
  // How long it may be without a learner, the first time included. Time spent waiting
  // for an action does not count.
  Milliseconds maximum_downtime{60'000};
  // How long a learner may take to say hello.
  Milliseconds hello_timeout{10'000};
  // Whether messages may go through shared memory, see shared_lane.h.
  bool offers_memory = true;
};

struct EnvClientStats {
  bool connected = false;       // now
  bool finished = false;        // the learner has completed its run
  uint64_t num_steps = 0;       // E for each
  uint64_t num_episodes = 0;    // steps in which those of all E have ended
  uint64_t num_reconnects = 0;  // times that it was back after a loss
  std::string last_error;       // why it was without a learner last
};

// Thread-safe.
class EnvClient {
 public:
  // Throws std::invalid_argument on a bad address or insufficient security.
  EnvClient(EnvironmentFactory factory, EnvClientOptions options);
  ~EnvClient();  // stops
  EnvClient(const EnvClient&) = delete;

  // Makes the environment, dials, resets it once there is a learner, which says what
  // games it plays, and steps as the learner says, until stop(); with
  // `num_episodes`, until the episodes of all E have ended together so many times, and
  // leaves then; or until the learner has completed its run. A lost connection is
  // dialled again, and the environment goes on where it was. To be called once. Throws
  //   RefusedError        the learner says no: a wrong token, another version, ...
  //   TransportError      no learner for too long
  //   std::runtime_error  the environment raised, also in its making; with its
  //                       traceback. The learner is told, too, if it is there
  void run(std::optional<uint64_t> num_episodes = std::nullopt,
           const Interrupt& interrupt = nullptr);
  // The same, but the environment lives in this thread, and `interrupt` is called while
  // there is no learner, and at the end. While it hangs, this does not return.
  void run_here(std::optional<uint64_t> num_episodes = std::nullopt,
                const Interrupt& interrupt = nullptr);

  // Ends run(), once a step in progress is made. An environment that hangs is left
  // behind `limit` after the first call; a line on stderr says where it hangs. It goes
  // on using the factory and what that has made. Does not wait. May be called from any
  // thread, any number of times, also before run().
  void stop(Milliseconds limit = kStopLimit);

  EnvClientStats stats() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchbeast
