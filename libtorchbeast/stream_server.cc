#include "stream_server.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <grpcpp/support/server_interceptor.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchbeast {

namespace {

// Time limit of the TLS handshake, and of a connection without a stream.
constexpr Milliseconds kIdleTimeout{10'000};

// Looks the same whatever the guess, so that its time tells nothing about the token.
bool equal_secrets(const std::string& a, const std::string& b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ (i < b.size() ? b[i] : '\xff'));
  }
  return difference == 0;
}

// Threads of a server beyond those of its streams: who has not shown the token takes at
// most these. A call that finds none is refused by gRPC.
constexpr int kSpareThreads = 32;
// At once. gRPC's clients know it, and keep further streams waiting.
constexpr int kStreamsPerConnection = 16;

// Counts calls that end badly, also such that no handler sees: of methods that the
// service does not have, and when there is no thread.
class FailedCalls : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit FailedCalls(PeerConnections* accepted) : accepted_(*accepted) {}

  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* call) override {
    return new Count(this, call);  // gRPC deletes it
  }

 private:
  struct Count : grpc::experimental::Interceptor {
    Count(FailedCalls* all, grpc::experimental::ServerRpcInfo* call)
        : accepted(all->accepted_), call(*call) {}
    void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
      using Point = grpc::experimental::InterceptionHookPoints;
      if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_STATUS) &&
          counts(methods->GetSendStatus().error_code())) {
        accepted.count_failure(call.server_context()->peer());
      }
      methods->Proceed();
    }
    // Who is refused for a hello has said one, which costs it as much.
    static bool counts(grpc::StatusCode code) {
      return code != grpc::StatusCode::OK &&
             code != grpc::StatusCode::INVALID_ARGUMENT &&
             code != grpc::StatusCode::FAILED_PRECONDITION;
    }
    PeerConnections& accepted;
    grpc::experimental::ServerRpcInfo& call;
  };
  PeerConnections& accepted_;
};

// By stop().
const char* why_cut_off(const char* method) {
  return method == kJoinMethod ? "is cut off: the learner is about to end"
                               : "is cut off: the environment server is about to end";
}

// The server whose handler runs in this thread.
thread_local const void* handling = nullptr;

}  // namespace

struct StreamServer::Listening {
  std::unique_ptr<ListeningSocket> socket;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
  std::unique_ptr<grpc::Server> server;
};

// --- One stream

// From here on watch() and stop() may cancel the connection.
void StreamServer::add(ServedConnection* connection, const std::string& peer_name) {
  MutexLock lock(mutex_);
  if (finished_) throw Ended(End::kFinished, kRunIsComplete);
  if (stopping_) throw TransportError(connection->peer() + " " + why_cut_off(method_));
  const auto is_same = [&](const auto& other) { return other.second == peer_name; };
  if (connections_.size() >= static_cast<size_t>(options_.max_streams) ||
      std::count_if(connections_.begin(), connections_.end(), is_same) >=
          kStreamsPerConnection) {
    throw Ended(End::kBusy, "too many streams at once; try again later");
  }
  connections_.emplace(connection, peer_name);
  allow_threads();
}

void StreamServer::remove(ServedConnection* connection) {
  MutexLock lock(mutex_);
  connections_.erase(connection);
  allow_threads();
}

void StreamServer::allow_threads() {
  quota_.SetMaxThreads(static_cast<int>(connections_.size()) + kSpareThreads);
}

bool StreamServer::has_token(const grpc::ServerContext& context) const {
  if (options_.security.token.empty()) return true;
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) return false;
  const std::string given(found->second.data(), found->second.size());
  return equal_secrets("Bearer " + options_.security.token, given);
}

grpc::Status StreamServer::serve(grpc::ServerContext* context, ServedStream* stream) {
  ServedConnection connection(context, stream, peer_);
  const auto as_this = as_handler();
  const End end = end_of([&] {
    if (!has_token(*context)) {
      throw Ended(End::kStranger, "the token is missing or wrong");
    }
    accepted_.welcome(context->peer());
    add(&connection, context->peer());
    const AtEnd removal([&] { remove(&connection); });
    return handler_(connection);
  });
  const grpc::Status status = to_status(end);
  if (end.is_refusal()) {
    ++num_refused_;
    if (on_refusal_) on_refusal_(connection.peer(), status.error_message());
  }
  // Streams that have ended without a word are none that an environment needs.
  if (status.ok() && connection.is_shaking_hands()) {
    accepted_.count_failure(context->peer());
  }
  return status;
}

// Accepts connections, and ends streams whose peers say nothing.
void StreamServer::watch(const Listening& listening) {
  const Milliseconds limit = std::min(options_.hello_timeout, kIdleTimeout);
  Clock::time_point next_look = Clock::now();
  while (true) {
    {
      MutexLock lock(mutex_);
      if (stopping_) return;
      for (const auto& [connection, name] : connections_) {
        if (!connection->is_shaking_hands()) continue;
        connection->cancel_if_slow(options_.hello_timeout,
                                   "has not said hello in time");
      }
    }
    if (Clock::now() >= next_look) {
      accepted_.drop_strangers(limit, 1 << 18);  // a handshake has some thousand
      next_look = time_after(kInterruptPeriod);
    }
    const int fd = listening.socket->accept(kInterruptPeriod);
    if (fd < 0) continue;
    accepted_.add(fd);
    if (address_.is_unix()) {  // only so its peer gets a name of its own
      grpc::AddInsecureChannelFromFd(listening.server.get(), fd);
      continue;
    }
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = fd;
    listening.acceptor->HandleNewConnection(&connection);
  }
}

// --- The server

StreamServer::StreamServer(const char* method, std::string peer, Handler handler,
                           StreamServerOptions options, OnRefusal on_refusal)
    : peer_(std::move(peer)),
      handler_(std::move(handler)),
      options_(std::move(options)),
      on_refusal_(std::move(on_refusal)),
      address_(options_.address),
      credentials_(server_credentials(address_, options_.security)),
      method_(method),
      service_([this](grpc::ServerContext* context,
                      ServedStream* stream) { return serve(context, stream); },
               method) {
  if (options_.max_streams < 1) {
    throw std::invalid_argument("max_streams must be at least 1, got " +
                                std::to_string(options_.max_streams));
  }
  MutexLock lock(mutex_);
  allow_threads();
}

StreamServer::~StreamServer() = default;

void StreamServer::start() {
  MutexLock lifecycle(lifecycle_);
  {
    MutexLock lock(mutex_);
    if (stopping_) throw std::runtime_error("this server has been stopped");
    if (started_) throw std::runtime_error("this server has been started");
  }
  // gRPC ends the process if the system refuses it a thread, so one is asked for first.
  Thread([] {}).join();
  auto listening = std::make_unique<Listening>();
  listening->socket = std::make_unique<ListeningSocket>(address_);
  grpc::ServerBuilder builder;
  set_arguments(address_, &quota_, &builder);
  const auto idle =
      static_cast<int>(std::min(options_.hello_timeout, kIdleTimeout).count());
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, idle);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, idle);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
  // One takes up calls while the other is busy with reading: they may be too many.
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 2);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 3);
  listening->acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      credentials_);
  builder.RegisterService(&service_);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
      interceptors;
  interceptors.push_back(std::make_unique<FailedCalls>(&accepted_));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  listening->server = builder.BuildAndStart();
  if (listening->server == nullptr) {
    throw std::runtime_error("cannot listen on " + address_.to_string() +
                             ": the certificate and key don't fit");
  }
  MutexLock lock(mutex_);
  const int port = listening->socket->port();
  watcher_ = Thread([this, listening = std::move(listening)] {
    watch(*listening);  // once the lock is free
    end(*listening);
  });
  port_ = port;
  started_ = true;
}

void StreamServer::run(const Interrupt& interrupt) {
  bool start_now;
  {
    MutexLock lifecycle(lifecycle_);
    MutexLock lock(mutex_);
    start_now = !started_ && !stopping_;
  }
  if (start_now) start();
  MutexLock lock(mutex_);
  wait(interrupt);
}

// gRPC waits for handlers without a limit. So the watcher does that, and this thread
// waits for it, for a while.
void StreamServer::stop(Milliseconds limit, std::shared_ptr<void> owner) {
  {
    MutexLock lifecycle(lifecycle_);
    MutexLock lock(mutex_);
    if (!stopping_) {
      give_up_at_ = time_after(limit);
      if (started_) {
        owner_ = std::move(owner);
      } else {
        ended_ = true;
      }
    }
    stopping_ = true;
    for (const auto& [connection, name] : connections_) {
      connection->cancel(why_cut_off(method_));
    }
  }
  changed_.notify_all();
  if (handling == this) return;
  {
    MutexLock lock(mutex_);
    wait(nullptr);
    if (!ended_) return;
  }
  MutexLock lifecycle(lifecycle_);
  watcher_.join();
}

void StreamServer::finish() {
  MutexLock lock(mutex_);
  finished_ = true;
  for (const auto& [connection, name] : connections_) {
    connection->cancel(kRunIsComplete);
  }
}

AtEnd<void (*)()> StreamServer::as_handler() const {
  handling = this;
  return AtEnd<void (*)()>([] { handling = nullptr; });
}

void StreamServer::end(Listening& listening) {
  std::shared_ptr<void> kept;  // may be the last to keep this
  listening.socket = nullptr;
  // What stop() has sent goes out before connections are closed.
  listening.server->Shutdown(std::chrono::system_clock::now() + kInterruptPeriod);
  listening.server->Wait();
  listening.server = nullptr;
  {
    MutexLock lock(mutex_);
    kept = std::move(owner_);
    ended_ = true;
  }
  changed_.notify_all();
}

bool StreamServer::has_given_up() const {
  MutexLock lock(mutex_);
  return is_over() && !ended_;
}

std::string StreamServer::address() const {
  MutexLock lock(mutex_);
  if (address_.is_unix() || port_ == 0) return address_.to_string();
  const std::string text = address_.to_string();
  return text.substr(0, text.rfind(':') + 1) + std::to_string(port_);
}

uint64_t StreamServer::num_streams() const {
  MutexLock lock(mutex_);
  return connections_.size();
}

}  // namespace torchbeast
