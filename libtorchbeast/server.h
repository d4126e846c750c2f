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
  uint64_t bytes_copied = 0;
};

// Thread-safe.
class EnvServer {
 public:
  // Throws std::invalid_argument on a bad address or insufficient security.
  EnvServer(EnvironmentFactory factory, StreamServerOptions options);
  ~EnvServer();  // stops
  EnvServer(const EnvServer&) = delete;

  void start();  // as StreamServer's, and so are the others
  void run(const Interrupt& interrupt = nullptr);
  // The same, but the environments of one stream at a time live in this thread, from
  // making to closing. Those of further streams have threads of their own. `interrupt`
  // is not called meanwhile, and while an environment hangs here, this does not return.
  // REQUIRES: start() has returned.
  void run_here(const Interrupt& interrupt = nullptr);
  // Environments that hang are left behind; a line on stderr names them. They go on
  // using the factory and what it has made.
  void stop(Milliseconds limit = kStopLimit);
  std::string address() const;
  EnvServerStats stats() const;

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchbeast
