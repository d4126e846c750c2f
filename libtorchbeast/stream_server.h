// Listens at an address and runs a handler for each stream: what EnvServer and Listener
// have in common.

#pragma once

#include <grpcpp/resource_quota.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "connection.h"
#include "end.h"
#include "sockets.h"
#include "sync.h"
#include "thread.h"
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
  // Called in a thread of its own for each stream that shows the token. Returns how the
  // stream ends, or throws it; the other side gets it as to_status() says.
  using Handler = std::function<End(ServedConnection&)>;
  // Called in the stream's thread if the peer is refused, with the peer and the reason.
  using OnRefusal = std::function<void(const std::string&, const std::string&)>;

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
  // The learner's run is complete: ends all streams with OK, also those to come.
  void finish() TB_EXCLUDES(mutex_);
  // Until the end of the scope this thread is that of a handler.
  AtEnd<void (*)()> as_handler() const;
  // Whether some handlers had not returned in time, and still have not.
  bool has_given_up() const;
  // Calls f for each stream that has shown the token, with a lock held.
  template <typename F>
  void for_each_stream(const F& f) const TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    for (const auto& [connection, peer_name] : connections_) f(*connection);
  }

  // Where it listens, with the port that it has found.
  std::string address() const TB_EXCLUDES(mutex_);
  uint64_t num_streams() const TB_EXCLUDES(mutex_);  // now
  uint64_t num_refused() const { return num_refused_; }

 private:
  struct Listening;  // what the watcher has

  grpc::Status serve(grpc::ServerContext* context, ServedStream* stream)
      TB_EXCLUDES(mutex_);
  bool has_token(const grpc::ServerContext& context) const;
  void add(ServedConnection* connection, const std::string& peer_name)
      TB_EXCLUDES(mutex_);
  void remove(ServedConnection* connection) TB_EXCLUDES(mutex_);
  void allow_threads() TB_REQUIRES(mutex_);
  void watch(const Listening& listening) TB_EXCLUDES(mutex_);
  void end(Listening& listening) TB_EXCLUDES(mutex_);
  bool is_over() const TB_REQUIRES(mutex_) {
    return ended_ || Clock::now() >= give_up_at_;
  }
  void wait(const Interrupt& interrupt) TB_REQUIRES(mutex_) {
    while (!is_over()) changed_.wait_until(mutex_, give_up_at_, interrupt);
  }

  const std::string peer_;
  const Handler handler_;
  const StreamServerOptions options_;
  const OnRefusal on_refusal_;
  const Address address_;
  const std::shared_ptr<grpc::ServerCredentials> credentials_;
  const char* const method_;
  StreamService service_;
  PeerConnections accepted_;
  grpc::ResourceQuota quota_{"torchbeast"};

  Mutex lifecycle_;  // one start() or stop() at a time; taken before `mutex_`
  // Accepts connections, and ends the server after stop(), when there may be no thread
  // left to be had.
  Thread watcher_ TB_GUARDED_BY(lifecycle_);

  mutable Mutex mutex_;
  CondVar changed_;
  bool started_ TB_GUARDED_BY(mutex_) = false;
  bool stopping_ TB_GUARDED_BY(mutex_) = false;
  bool finished_ TB_GUARDED_BY(mutex_) = false;
  std::shared_ptr<void> owner_ TB_GUARDED_BY(mutex_);  // see stop()
  Clock::time_point give_up_at_ TB_GUARDED_BY(mutex_) = Clock::time_point::max();
  bool ended_ TB_GUARDED_BY(mutex_) = false;  // all handlers have returned
  int port_ TB_GUARDED_BY(mutex_) = 0;
  // Of streams with the token; and gRPC's names of their peers.
  std::map<ServedConnection*, std::string> connections_ TB_GUARDED_BY(mutex_);

  std::atomic<uint64_t> num_refused_{0};
};

}  // namespace torchbeast
