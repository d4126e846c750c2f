#include "stream_server.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_context.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "wire.h"

namespace torchbeast {

namespace {

constexpr Milliseconds kHandshakeTimeout{10'000};  // for TLS

// Looks the same whatever the guess, so that its time tells nothing about the token.
bool equal_secrets(const std::string& a, const std::string& b) {
  unsigned char difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i] ^ (i < b.size() ? b[i] : '\xff'));
  }
  return difference == 0;
}

[[noreturn]] void cannot_listen(const std::string& address, const std::string& reason) {
  throw std::runtime_error("cannot listen on " + address + ": " + reason);
}

// Tells the socket of a running server from one that was left behind. A dead one may
// stay: listening replaces it.
void check_socket_path(const Address& address) {
  struct stat status;
  const std::string& path = address.path();
  if (lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    cannot_listen(address.to_string(), std::strerror(errno));
  }
  if (!S_ISSOCK(status.st_mode)) {
    cannot_listen(address.to_string(),
                  "there is a file of this name that is not a socket; move it away or "
                  "choose another path");
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0) cannot_listen(address.to_string(), std::strerror(errno));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size() + 1);
  const int result = connect(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name));
  const int error = errno;
  close(fd);
  if (result == 0) {
    cannot_listen(address.to_string(),
                  "another server listens there; stop it or choose another path");
  }
  if (error != ECONNREFUSED && error != ENOENT) {
    cannot_listen(address.to_string(), std::strerror(error));
  }
}

void check_directory(const Address& address) {
  const size_t slash = address.path().rfind('/');
  const std::string directory =
      slash == std::string::npos ? "." : address.path().substr(0, slash + 1);
  if (access(directory.c_str(), W_OK | X_OK) != 0) {
    cannot_listen(address.to_string(),
                  "directory " + directory + ": " + std::strerror(errno));
  }
}

}  // namespace

struct StreamServer::State {
  State(const char* method, StreamService::Handler handler, StreamServerOptions options)
      : handler(std::move(handler)),
        options(std::move(options)),
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

  // One stream, in a thread of its own.
  grpc::Status serve(grpc::ServerContext* context, ServedStream* stream);
  bool has_token(const grpc::ServerContext& context) const;
  ~State() {
    if (ender.joinable()) ender.detach();  // this is its last act
  }

  void watch() TB_EXCLUDES(mutex);
  void end(std::unique_ptr<grpc::Server> server) TB_EXCLUDES(mutex);
  bool is_over() const TB_REQUIRES(mutex) {
    return ended || (stopping && Clock::now() >= give_up_at);
  }
  void remove_socket() TB_REQUIRES(lifecycle);

  const StreamService::Handler handler;
  const StreamServerOptions options;
  const Address address;
  const std::shared_ptr<grpc::ServerCredentials> credentials;
  StreamService service;

  Mutex lifecycle;  // one start() or stop() at a time; taken before `mutex`
  std::unique_ptr<grpc::Server> server TB_GUARDED_BY(lifecycle);
  std::thread ender TB_GUARDED_BY(lifecycle);  // see stop()
  ino_t socket_inode TB_GUARDED_BY(lifecycle) = 0;
  std::thread watcher;  // of start(), then of the ender

  Mutex mutex;
  CondVar changed;
  bool stopping TB_GUARDED_BY(mutex) = false;
  Clock::time_point give_up_at TB_GUARDED_BY(mutex);  // if stopping
  bool ended TB_GUARDED_BY(mutex) = false;            // all handlers have returned
  int port TB_GUARDED_BY(mutex) = 0;
  // Streams whose peers have not said hello yet.
  std::set<std::pair<Clock::time_point, grpc::ServerContext*>> silent
      TB_GUARDED_BY(mutex);

  std::atomic<int> num_streams{0};
  std::atomic<uint64_t> num_refused{0};
};

namespace {

// The server whose handler runs in this thread.
thread_local const void* handling = nullptr;

}  // namespace

// --- One stream
// -----------------------------------------------------------------------

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
  struct Count {
    explicit Count(std::atomic<int>* count) : count(*count), now(++*count) {}
    ~Count() { --count; }
    std::atomic<int>& count;
    const int now;
  };
  const Count count(&num_streams);
  handling = this;
  grpc::Status status;
  try {
    if (!has_token(*context)) {
      throw Refusal{{grpc::StatusCode::UNAUTHENTICATED,
                     "it wants a token, and the one given is missing or "
                     "wrong"}};
    }
    if (count.now > options.max_streams) {
      throw Refusal{{grpc::StatusCode::RESOURCE_EXHAUSTED,
                     "this server has its " + std::to_string(options.max_streams) +
                         " streams already"}};
    }
    return handler(context, stream);
  } catch (const Refusal& refusal) {
    status = refusal.status;
  } catch (const WireError& error) {
    status = {grpc::StatusCode::INVALID_ARGUMENT, error.what()};
  }
  ++num_refused;
  if (options.on_refusal) options.on_refusal(context->peer(), status);
  return status;
}

StreamServer::HelloDeadline::HelloDeadline(StreamServer* server,
                                           grpc::ServerContext* context)
    : state_(*server->state_), since_(Clock::now()), context_(context) {
  MutexLock lock(state_.mutex);
  state_.silent.emplace(since_, context_);
}

StreamServer::HelloDeadline::~HelloDeadline() {
  MutexLock lock(state_.mutex);
  state_.silent.erase({since_, context_});
}

// Ends streams whose peers say nothing.
void StreamServer::State::watch() {
  MutexLock lock(mutex);
  while (!stopping) {
    for (const auto& [since, context] : silent) {
      if (is_longer(Clock::now() - since, options.hello_timeout)) context->TryCancel();
    }
    changed.wait_until(mutex, Clock::now() + kInterruptPeriod, nullptr);
  }
}

void StreamServer::State::remove_socket() {
  struct stat status;
  if (socket_inode != 0 && lstat(address.path().c_str(), &status) == 0 &&
      status.st_ino == socket_inode) {
    unlink(address.path().c_str());
  }
  socket_inode = 0;  // once: the next server's may get the same number
}

// --- The server
// -----------------------------------------------------------------------

StreamServer::StreamServer(const char* method, StreamService::Handler handler,
                           StreamServerOptions options)
    : state_(std::make_unique<State>(method, std::move(handler), std::move(options))) {}

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
  const Address& address = state.address;
  if (address.is_unix()) {
    check_directory(address);
    check_socket_path(address);
  }
  grpc::ServerBuilder builder;
  set_arguments(&builder);
  // Two servers must not share a port: each would get some of the streams.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(
      GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
      static_cast<int>(
          std::min(state.options.hello_timeout, kHandshakeTimeout).count()));
  int port = 0;
  builder.AddListeningPort(address.to_string(), state.credentials, &port);
  builder.RegisterService(&state.service);
  // The socket is born private; there is no moment at which others can connect.
  const mode_t mask = address.is_unix() ? umask(0177) : 0;
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (address.is_unix()) umask(mask);
  if (server == nullptr || port == 0) {
    cannot_listen(address.to_string(),
                  address.is_unix()
                      ? "the system refuses this path"
                      : "the port is in use, or the host is not one of this machine, "
                        "or the certificate and key don't fit");
  }
  struct stat status;
  if (address.is_unix() && lstat(address.path().c_str(), &status) == 0) {
    state.socket_inode = status.st_ino;
  }
  state.server = std::move(server);
  state.watcher = std::thread([&state] { state.watch(); });
  MutexLock lock(state.mutex);
  state.port = port;
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
  while (!state.is_over()) {
    state.changed.wait_until(
        state.mutex, state.stopping ? state.give_up_at : Clock::time_point::max(),
        interrupt);
  }
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
    while (!state.is_over()) {
      state.changed.wait_until(state.mutex, state.give_up_at, nullptr);
    }
    ended = state.ended;
  }
  MutexLock lifecycle(state.lifecycle);
  state.remove_socket();
  if (ended && state.ender.joinable()) state.ender.join();
}

void StreamServer::State::end(std::unique_ptr<grpc::Server> server) {
  server->Shutdown(std::chrono::system_clock::now());  // cancels all streams
  server->Wait();
  server = nullptr;
  watcher.join();
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
  return static_cast<uint64_t>(std::max(0, state_->num_streams.load()));
}

uint64_t StreamServer::num_refused() const { return state_->num_refused; }

}  // namespace torchbeast
