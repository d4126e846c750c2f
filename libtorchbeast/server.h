// Serves environments: each stream has one of its own, of E environments in lockstep.

#pragma once

#include <memory>
#include <string>

#include "environment.h"
#include "stream_server.h"
#include "sync.h"

namespace torchbeast {

struct EnvServerStats {
  uint64_t num_streams = 0;  // now
  uint64_t num_steps = 0;    // E for each
  uint64_t num_refused = 0;  // streams that were turned away
  uint64_t bytes_sent = 0;
  uint64_t bytes_copied = 0;
};

// Thread-safe.
class EnvServer {
 public:
  // Throws std::invalid_argument on a bad address or insufficient security.
  EnvServer(EnvironmentFactory factory, StreamServerOptions options);
  ~EnvServer();  // stops
  EnvServer(const EnvServer&) = delete;

  // Listens from here on. Throws std::runtime_error, with the reason, if that can't be:
  // no such directory, in use by a running server, ... A socket that a dead server has
  // left is replaced; one that this server makes is the user's alone.
  void start();
  // Blocks until stop() is done or gives up. Starts if that has not been done.
  void run(const Interrupt& interrupt = nullptr);
  // Ends all streams, waits for their environments to be destroyed, and removes the
  // socket. Environments that hang are left behind `limit` after the first call; a line
  // on stderr names them. They go on using the factory and what it has made. May be
  // called from any thread, also that of an environment, which is not waited for then;
  // any number of times, also before start.
  void stop(Milliseconds limit = kStopLimit);

  // Where it listens, with the port that it has found.
  std::string address() const;
  EnvServerStats stats() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchbeast
