// Listens at an address and runs a handler for each stream: what EnvServer and Listener
// have in common.

#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "sync.h"
#include "transport.h"

namespace torchbeast {

struct StreamServerOptions {
  std::string address;  // port 0: a free one
  Security security;
  int max_streams = 256;  // at once; more are refused
  // How long a peer that has connected may take for its hello.
  Milliseconds hello_timeout{10'000};
};

// Thread-safe. Owns the streams' threads.
class StreamServer {
 public:
  // Calls `handler` in a thread of its own for each stream that shows the token. What
  // it throws becomes the stream's status, and counts as a refusal, but for the last:
  //   RefusedError    FAILED_PRECONDITION
  //   WireError       INVALID_ARGUMENT
  //   BusyError       RESOURCE_EXHAUSTED
  //   TransportError  UNAVAILABLE
  // Calls `on_refusal`, if not null, with the peer and the status in the stream's
  // thread. Throws std::invalid_argument on a bad address or insufficient security.
  using OnRefusal = std::function<void(const std::string&, const grpc::Status&)>;
  StreamServer(const char* method, StreamService::Handler handler,
               StreamServerOptions options, OnRefusal on_refusal = nullptr);
  ~StreamServer();  // REQUIRES: stop() was called
  StreamServer(const StreamServer&) = delete;

  // Listens from here on. Throws std::runtime_error, with the reason, if that can't be:
  // no such directory, in use by a running server, ... A socket that a dead server has
  // left is replaced; one that this server makes is the user's alone.
  void start();
  // Blocks until stop() is done or gives up. Starts if that has not been done.
  void run(const Interrupt& interrupt = nullptr);
  // Cancels all streams, waits for their handlers to return, and removes the socket.
  // Gives up `limit` after the first call, and does not wait at all in the thread of a
  // handler. `owner` keeps this and all that the handlers use until they have returned.
  // May be called from any thread, any number of times, also before start.
  void stop(Milliseconds limit, std::shared_ptr<void> owner);
  // Whether some handlers had not returned in time, and still have not.
  bool has_given_up() const;

  // Where it listens, with the port that it has found.
  std::string address() const;
  uint64_t num_streams() const;  // now
  uint64_t num_refused() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;

 public:
  // While it lives, the peer of a stream owes its hello; if it does not come in time,
  // the stream is cancelled.
  class HelloDeadline {
   public:
    HelloDeadline(StreamServer* server, grpc::ServerContext* context);
    ~HelloDeadline();
    HelloDeadline(const HelloDeadline&) = delete;

   private:
    State& state_;
    const Clock::time_point since_;
    grpc::ServerContext* const context_;
  };
};

}  // namespace torchbeast
