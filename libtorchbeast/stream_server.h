// Listens at an address and runs a handler for each stream: what EnvServer and Listener
// have in common.

#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "connection.h"
#include "sync.h"
#include "transport.h"

namespace torchbeast {

struct StreamServerOptions {
  std::string address;  // port 0: a free one
  Security security;
  int max_streams = 256;  // at once, with the token; more are refused
  // How long a peer that has connected may take for its hello.
  Milliseconds hello_timeout{10'000};
};

// Thread-safe. Owns the streams' threads.
class StreamServer {
 public:
  // Called in a thread of its own for each stream that shows the token. The stream ends
  // with status OK if it returns or throws Connection::Left; otherwise with the text of
  // what it throws, and one of these, of which the first three count as refusals:
  //   RefusedError    FAILED_PRECONDITION
  //   WireError       INVALID_ARGUMENT
  //   BusyError       RESOURCE_EXHAUSTED
  //   TransportError  UNAVAILABLE
  //   std::exception  ABORTED
  using Handler = std::function<void(ServedConnection&)>;
  // Called with the peer and the status in the stream's thread.
  using OnRefusal = std::function<void(const std::string&, const grpc::Status&)>;

  // `peer` goes before a peer's address in messages; `on_refusal` may be null. Throws
  // std::invalid_argument on a bad address or insufficient security.
  StreamServer(const char* method, std::string peer, Handler handler,
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
  // Stops waiting `limit` after the first call, and does not wait at all in the thread
  // of a handler. `owner` keeps this and all that the handlers use until they have
  // returned. May be called from any thread, any number of times, also before start.
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
};

}  // namespace torchbeast
