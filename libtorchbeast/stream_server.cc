#include "stream_server.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>
#include <utility>

#include "sockets.h"
#include "stream_spec.h"
#include "text.h"

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

// gRPC takes up to 8 KiB of headers, in which a byte of the text may become three.
grpc::Status make_status(grpc::StatusCode code, const std::exception& error) {
  return {code, shortened(error.what(), 2500)};
}

}  // namespace

struct StreamServer::State {
  State(const char* method, std::string peer, Handler handler,
        StreamServerOptions options, OnRefusal on_refusal)
      : peer(std::move(peer)),
        handler(std::move(handler)),
        options(std::move(options)),
        on_refusal(std::move(on_refusal)),
        address(this->options.address),
        credentials(server_credentials(address, this->options.security)),
        service([this](grpc::ServerContext* context,
                       ServedStream* stream) { return serve(context, stream); },
                method) {
    if (this->options.max_streams < 1) {
      throw std::invalid_argument("max_streams must be at least 1, got " +
                                  std::to_string(this->options.max_streams));
    }
  }
  ~State() {
    if (ender.joinable()) ender.detach();  // it does nothing after this
  }

  // One stream, in a thread of its own.
  grpc::Status serve(grpc::ServerContext* context, ServedStream* stream)
      TB_EXCLUDES(mutex);
  bool has_token(const grpc::ServerContext& context) const;
  void watch() TB_EXCLUDES(mutex);
  void end(std::unique_ptr<grpc::Server> server) TB_EXCLUDES(mutex);
  bool is_over() const TB_REQUIRES(mutex) {
    return ended || Clock::now() >= give_up_at;
  }
  void wait(const Interrupt& interrupt) TB_REQUIRES(mutex) {
    while (!is_over()) changed.wait_until(mutex, give_up_at, interrupt);
  }

  const std::string peer;
  const Handler handler;
  const StreamServerOptions options;
  const OnRefusal on_refusal;
  const Address address;
  const std::shared_ptr<grpc::ServerCredentials> credentials;
  StreamService service;

  Mutex lifecycle;  // one start() or stop() at a time; taken before `mutex`
  std::unique_ptr<grpc::Server> server TB_GUARDED_BY(lifecycle);
  std::thread ender TB_GUARDED_BY(lifecycle);  // see stop()
  // Accepts connections. While it runs, socket and acceptor are its own.
  std::thread watcher TB_GUARDED_BY(lifecycle);
  std::unique_ptr<ListeningSocket> socket;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;

  Mutex mutex;
  CondVar changed;
  bool stopping TB_GUARDED_BY(mutex) = false;
  Clock::time_point give_up_at TB_GUARDED_BY(mutex) = Clock::time_point::max();
  bool ended TB_GUARDED_BY(mutex) = false;  // all handlers have returned
  int port TB_GUARDED_BY(mutex) = 0;
  std::set<Connection*> connections TB_GUARDED_BY(mutex);

  std::atomic<uint64_t> num_refused{0};
};

namespace {

// The server whose handler runs in this thread.
thread_local const void* handling = nullptr;

}  // namespace

// --- One stream

bool StreamServer::State::has_token(const grpc::ServerContext& context) const {
  if (options.security.token.empty()) return true;
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) return false;
  const std::string given(found->second.data(), found->second.size());
  return equal_secrets("Bearer " + options.security.token, given);
}

grpc::Status StreamServer::State::serve(grpc::ServerContext* context,
                                        ServedStream* stream) {
  ServedConnection connection(context, stream, peer);
  // While it lives, watch() may cancel the connection.
  struct Registration {
    Registration(State* state, Connection* connection)
        : state(*state), connection(connection) {
      MutexLock lock(state->mutex);
      state->connections.insert(connection);
      number = state->connections.size();
    }
    ~Registration() {
      MutexLock lock(state.mutex);
      state.connections.erase(connection);
    }
    State& state;
    Connection* const connection;
    size_t number;
  };
  const Registration registration(this, &connection);
  handling = this;
  grpc::Status status;
  try {
    if (!has_token(*context)) {
      status = {grpc::StatusCode::UNAUTHENTICATED, "the token is missing or wrong"};
    } else if (registration.number > static_cast<size_t>(options.max_streams)) {
      status = {grpc::StatusCode::RESOURCE_EXHAUSTED,
                "too many streams at once; try again later"};
    } else {
      handler(connection);
      return grpc::Status::OK;
    }
  } catch (const Connection::Left&) {
    return grpc::Status::OK;
  } catch (const RefusedError& error) {
    status = make_status(grpc::StatusCode::FAILED_PRECONDITION, error);
  } catch (const WireError& error) {
    status = make_status(grpc::StatusCode::INVALID_ARGUMENT, error);
  } catch (const BusyError& error) {
    status = make_status(grpc::StatusCode::RESOURCE_EXHAUSTED, error);
  } catch (const TransportError& error) {
    return make_status(grpc::StatusCode::UNAVAILABLE, error);
  } catch (const std::exception& error) {
    return make_status(grpc::StatusCode::ABORTED, error);
  }
  ++num_refused;
  if (on_refusal) on_refusal(connection.peer(), status);
  return status;
}

// Accepts connections, and ends streams whose peers say nothing.
void StreamServer::State::watch() {
  while (true) {
    {
      MutexLock lock(mutex);
      if (stopping) return;
      for (Connection* connection : connections) {
        if (!connection->is_shaking_hands()) continue;
        connection->cancel_if_slow(options.hello_timeout, "has not said hello in time");
      }
    }
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = socket->accept(kInterruptPeriod);
    if (connection.fd >= 0) acceptor->HandleNewConnection(&connection);
  }
}

// --- The server

StreamServer::StreamServer(const char* method, std::string peer, Handler handler,
                           StreamServerOptions options, OnRefusal on_refusal)
    : state_(std::make_unique<State>(method, std::move(peer), std::move(handler),
                                     std::move(options), std::move(on_refusal))) {}

StreamServer::~StreamServer() = default;

void StreamServer::start() {
  State& state = *state_;
  MutexLock lifecycle(state.lifecycle);
  {
    MutexLock lock(state.mutex);
    if (state.stopping) throw std::runtime_error("this server has been stopped");
  }
  if (state.server != nullptr) {
    throw std::runtime_error("this server has been started");
  }
  auto socket = std::make_unique<ListeningSocket>(state.address);
  grpc::ServerBuilder builder;
  set_arguments(state.address, &builder);
  const auto idle =
      static_cast<int>(std::min(state.options.hello_timeout, kIdleTimeout).count());
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, idle);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, idle);
  state.acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      state.credentials);
  builder.RegisterService(&state.service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) {
    throw std::runtime_error("cannot listen on " + state.address.to_string() +
                             ": the certificate and key don't fit");
  }
  {
    MutexLock lock(state.mutex);
    state.port = socket->port();
  }
  state.server = std::move(server);
  state.socket = std::move(socket);
  state.watcher = std::thread([&state] { state.watch(); });
}

void StreamServer::run(const Interrupt& interrupt) {
  State& state = *state_;
  bool start_now;
  {
    MutexLock lifecycle(state.lifecycle);
    MutexLock lock(state.mutex);
    if (state.stopping) return;
    start_now = state.server == nullptr;
  }
  if (start_now) start();
  MutexLock lock(state.mutex);
  state.wait(interrupt);
}

// gRPC waits for handlers without a limit. So a thread of its own does that, and this
// one waits for it, for a while.
void StreamServer::stop(Milliseconds limit, std::shared_ptr<void> owner) {
  State& state = *state_;
  {
    MutexLock lock(state.mutex);
    if (!state.stopping) state.give_up_at = time_after(limit);
    state.stopping = true;
  }
  state.changed.notify_all();
  {
    MutexLock lifecycle(state.lifecycle);
    if (state.server != nullptr) {
      state.watcher.join();
      state.socket = nullptr;
      state.ender = std::thread([&state, owner = std::move(owner),
                                 server = std::move(state.server)]() mutable {
        state.end(std::move(server));
      });
    } else if (!state.ender.joinable()) {  // never started
      MutexLock lock(state.mutex);
      state.ended = true;
    }
  }
  if (handling == &state) return;
  bool ended;
  {
    MutexLock lock(state.mutex);
    state.wait(nullptr);
    ended = state.ended;
  }
  MutexLock lifecycle(state.lifecycle);
  if (ended && state.ender.joinable()) state.ender.join();
}

void StreamServer::State::end(std::unique_ptr<grpc::Server> server) {
  server->Shutdown(std::chrono::system_clock::now());  // cancels all streams
  server->Wait();
  server = nullptr;
  {
    MutexLock lock(mutex);
    ended = true;
  }
  changed.notify_all();
}

bool StreamServer::has_given_up() const {
  MutexLock lock(state_->mutex);
  return state_->is_over() && !state_->ended;
}

std::string StreamServer::address() const {
  State& state = *state_;
  MutexLock lock(state.mutex);
  if (state.address.is_unix() || state.port == 0) return state.address.to_string();
  const std::string text = state.address.to_string();
  return text.substr(0, text.rfind(':') + 1) + std::to_string(state.port);
}

uint64_t StreamServer::num_streams() const {
  MutexLock lock(state_->mutex);
  return state_->connections.size();
}

uint64_t StreamServer::num_refused() const { return state_->num_refused; }

}  // namespace torchbeast
