#include "stream_server.h"

#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>
#include <grpcpp/server_posix.h>
#include <grpcpp/support/server_interceptor.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "sockets.h"
#include "stream_spec.h"
#include "text.h"
#include "thread.h"

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
  explicit FailedCalls(AcceptedConnections* accepted) : accepted_(*accepted) {}

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
    AcceptedConnections& accepted;
    grpc::experimental::ServerRpcInfo& call;
  };
  AcceptedConnections& accepted_;
};

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
        method(method),
        service([this](grpc::ServerContext* context,
                       ServedStream* stream) { return serve(context, stream); },
                method) {
    if (this->options.max_streams < 1) {
      throw std::invalid_argument("max_streams must be at least 1, got " +
                                  std::to_string(this->options.max_streams));
    }
    MutexLock lock(mutex);
    allow_threads();
  }
  // One stream, in a thread of its own.
  grpc::Status serve(grpc::ServerContext* context, ServedStream* stream)
      TB_EXCLUDES(mutex);
  grpc::Status run_handler(const grpc::ServerContext& context,
                           ServedConnection* connection) TB_EXCLUDES(mutex);
  bool has_token(const grpc::ServerContext& context) const;
  void allow_threads() TB_REQUIRES(mutex) {
    quota.SetMaxThreads(static_cast<int>(connections.size()) + kSpareThreads);
  }
  // What the watcher has.
  struct Listening {
    std::unique_ptr<ListeningSocket> socket;
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor;
    std::unique_ptr<grpc::Server> server;
  };
  void watch(const Listening& listening) TB_EXCLUDES(mutex);
  void end(Listening listening) TB_EXCLUDES(mutex);
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
  const char* const method;
  StreamService service;
  AcceptedConnections accepted;
  grpc::ResourceQuota quota{"torchbeast"};

  Mutex lifecycle;  // one start() or stop() at a time; taken before `mutex`
  // Accepts connections, and ends the server after stop(), when there may be no thread
  // left to be had.
  Thread watcher TB_GUARDED_BY(lifecycle);

  Mutex mutex;
  CondVar changed;
  bool started TB_GUARDED_BY(mutex) = false;
  bool stopping TB_GUARDED_BY(mutex) = false;
  std::shared_ptr<void> owner TB_GUARDED_BY(mutex);  // see stop()
  Clock::time_point give_up_at TB_GUARDED_BY(mutex) = Clock::time_point::max();
  bool ended TB_GUARDED_BY(mutex) = false;  // all handlers have returned
  int port TB_GUARDED_BY(mutex) = 0;
  // Of streams with the token; and gRPC's names of their peers.
  std::map<Connection*, std::string> connections TB_GUARDED_BY(mutex);

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
  handling = this;
  const grpc::Status status = run_handler(*context, &connection);
  switch (status.error_code()) {
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      ++num_refused;
      if (on_refusal) on_refusal(connection.peer(), status);
      break;
    default:
      break;
  }
  // Streams that have ended without a word are none that an environment needs.
  if (status.ok() && connection.is_shaking_hands()) {
    accepted.count_failure(context->peer());
  }
  return status;
}

grpc::Status StreamServer::State::run_handler(const grpc::ServerContext& context,
                                              ServedConnection* connection) {
  if (!has_token(context)) {
    return {grpc::StatusCode::UNAUTHENTICATED, "the token is missing or wrong"};
  }
  // While it lives, watch() may cancel the connection.
  struct Registration {
    Registration(State* state, Connection* connection, const std::string& name)
        : state(*state), connection(connection) {
      MutexLock lock(state->mutex);
      const auto& all = state->connections;
      const auto is_same = [&](const auto& other) { return other.second == name; };
      if (all.size() >= static_cast<size_t>(state->options.max_streams) ||
          std::count_if(all.begin(), all.end(), is_same) >= kStreamsPerConnection) {
        throw BusyError("too many streams at once; try again later");
      }
      state->connections.emplace(connection, name);
      state->allow_threads();
    }
    ~Registration() {
      MutexLock lock(state.mutex);
      state.connections.erase(connection);
      state.allow_threads();
    }
    State& state;
    Connection* const connection;
  };
  try {
    const Registration registration(this, connection, context.peer());
    handler(*connection);
    return grpc::Status::OK;
  } catch (const Connection::Left&) {
    return grpc::Status::OK;
  } catch (const RefusedError& error) {
    return make_status(grpc::StatusCode::FAILED_PRECONDITION, error);
  } catch (const WireError& error) {
    return make_status(grpc::StatusCode::INVALID_ARGUMENT, error);
  } catch (const BusyError& error) {
    return make_status(grpc::StatusCode::RESOURCE_EXHAUSTED, error);
  } catch (const TransportError& error) {
    return make_status(grpc::StatusCode::UNAVAILABLE, error);
  } catch (const std::exception& error) {
    return make_status(grpc::StatusCode::ABORTED, error);
  }
}

// Accepts connections, and ends streams whose peers say nothing.
void StreamServer::State::watch(const Listening& listening) {
  while (true) {
    {
      MutexLock lock(mutex);
      if (stopping) return;
      for (const auto& [connection, name] : connections) {
        if (!connection->is_shaking_hands()) continue;
        connection->cancel_if_slow(options.hello_timeout, "has not said hello in time");
      }
    }
    const int fd = listening.socket->accept(kInterruptPeriod);
    if (fd < 0) continue;
    accepted.add(fd);
    if (address.is_unix()) {  // only so its peer gets a name of its own
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
    : state_(std::make_unique<State>(method, std::move(peer), std::move(handler),
                                     std::move(options), std::move(on_refusal))) {}

StreamServer::~StreamServer() = default;

void StreamServer::start() {
  State& state = *state_;
  MutexLock lifecycle(state.lifecycle);
  {
    MutexLock lock(state.mutex);
    if (state.stopping) throw std::runtime_error("this server has been stopped");
    if (state.started) throw std::runtime_error("this server has been started");
  }
  // gRPC ends the process if the system refuses it a thread, so one is asked for first.
  // It gets nothing, and ends, if something is thrown here.
  Thread watcher;
  std::promise<State::Listening> made;
  watcher = Thread([&state, making = made.get_future()]() mutable {
    try {
      State::Listening listening = making.get();
      state.watch(listening);
      state.end(std::move(listening));
    } catch (const std::future_error&) {
    }
  });
  State::Listening listening;
  listening.socket = std::make_unique<ListeningSocket>(state.address);
  grpc::ServerBuilder builder;
  set_arguments(state.address, &state.quota, &builder);
  const auto idle =
      static_cast<int>(std::min(state.options.hello_timeout, kIdleTimeout).count());
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, idle);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, idle);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnection);
  // One takes up calls while the other is busy with reading: they may be too many.
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 2);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 3);
  listening.acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      state.credentials);
  builder.RegisterService(&state.service);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
      interceptors;
  interceptors.push_back(std::make_unique<FailedCalls>(&state.accepted));
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  listening.server = builder.BuildAndStart();
  if (listening.server == nullptr) {
    throw std::runtime_error("cannot listen on " + state.address.to_string() +
                             ": the certificate and key don't fit");
  }
  state.watcher = std::move(watcher);
  {
    MutexLock lock(state.mutex);
    state.port = listening.socket->port();
    state.started = true;
  }
  made.set_value(std::move(listening));
}

void StreamServer::run(const Interrupt& interrupt) {
  State& state = *state_;
  bool start_now;
  {
    MutexLock lifecycle(state.lifecycle);
    MutexLock lock(state.mutex);
    if (state.stopping) return;
    start_now = !state.started;
  }
  if (start_now) start();
  MutexLock lock(state.mutex);
  state.wait(interrupt);
}

// gRPC waits for handlers without a limit. So the watcher does that, and this thread
// waits for it, for a while.
void StreamServer::stop(Milliseconds limit, std::shared_ptr<void> owner) {
  State& state = *state_;
  {
    MutexLock lifecycle(state.lifecycle);
    MutexLock lock(state.mutex);
    if (!state.stopping) {
      state.give_up_at = time_after(limit);
      if (state.started) {
        state.owner = std::move(owner);
      } else {
        state.ended = true;
      }
    }
    state.stopping = true;
    for (const auto& [connection, name] : state.connections) {
      connection->cancel(state.method == kJoinMethod
                             ? "is cut off: the learner is about to end"
                             : "is cut off: the environment server is about to end");
    }
  }
  state.changed.notify_all();
  if (handling == &state) return;
  bool ended;
  {
    MutexLock lock(state.mutex);
    state.wait(nullptr);
    ended = state.ended;
  }
  MutexLock lifecycle(state.lifecycle);
  if (ended) state.watcher.join();
}

void StreamServer::State::end(Listening listening) {
  std::shared_ptr<void> kept;  // may be the last to keep this
  listening.socket = nullptr;
  // What stop() has sent goes out before connections are closed.
  listening.server->Shutdown(std::chrono::system_clock::now() + kInterruptPeriod);
  listening.server->Wait();
  listening.server = nullptr;
  {
    MutexLock lock(mutex);
    kept = std::move(owner);
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
