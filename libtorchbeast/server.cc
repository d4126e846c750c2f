#include "server.h"

#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
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

namespace torchbeast {

namespace {

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

struct EnvServer::State {
  State(EnvironmentFactory factory, EnvServerOptions options)
      : factory(std::move(factory)),
        options(std::move(options)),
        address(this->options.address),
        credentials(server_credentials(address, this->options.security)),
        service([this](grpc::ServerContext* context, EnvStream* stream) {
          return serve(context, stream);
        }) {
    if (this->options.max_streams < 1) {
      throw std::invalid_argument("max_streams must be at least 1, got " +
                                  std::to_string(this->options.max_streams));
    }
  }

  // One stream, in a thread of its own.
  grpc::Status serve(grpc::ServerContext* context, EnvStream* stream);
  grpc::Status run_stream(grpc::ServerContext* context, EnvStream* stream);
  grpc::Status write_error(EnvStream* stream, const std::string& message);
  bool has_token(const grpc::ServerContext& context) const;

  // Streams whose peers have not said hello yet.
  class Silent {
   public:
    Silent(State* state, grpc::ServerContext* context) : state_(*state) {
      MutexLock lock(state_.mutex);
      place_ = state_.silent.emplace(Clock::now(), context).first;
    }
    ~Silent() {
      MutexLock lock(state_.mutex);
      state_.silent.erase(place_);
    }

   private:
    State& state_;
    std::set<std::pair<Clock::time_point, grpc::ServerContext*>>::iterator place_;
  };
  void watch() TB_EXCLUDES(mutex);
  void remove_socket() const TB_REQUIRES(lifecycle);

  const EnvironmentFactory factory;
  const EnvServerOptions options;
  const Address address;
  const std::shared_ptr<grpc::ServerCredentials> credentials;
  StreamService service;

  Mutex lifecycle;  // one start() or stop() at a time; taken before `mutex`
  std::unique_ptr<grpc::Server> server TB_GUARDED_BY(lifecycle);
  std::thread watcher TB_GUARDED_BY(lifecycle);
  ino_t socket_inode TB_GUARDED_BY(lifecycle) = 0;

  Mutex mutex;
  CondVar changed;
  bool stopping TB_GUARDED_BY(mutex) = false;
  bool stopped TB_GUARDED_BY(mutex) = false;
  int port TB_GUARDED_BY(mutex) = 0;
  std::set<std::pair<Clock::time_point, grpc::ServerContext*>> silent
      TB_GUARDED_BY(mutex);

  std::atomic<int> num_streams{0};
  std::atomic<uint64_t> num_steps{0};
  std::atomic<uint64_t> num_refused{0};
  std::atomic<uint64_t> bytes_sent{0};
  std::atomic<uint64_t> bytes_copied{0};
};

// --- One stream
// -----------------------------------------------------------------------

bool EnvServer::State::has_token(const grpc::ServerContext& context) const {
  if (options.security.token.empty()) return true;
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find("authorization");
  if (found == metadata.end()) return false;
  const std::string given(found->second.data(), found->second.size());
  return equal_secrets("Bearer " + options.security.token, given);
}

grpc::Status EnvServer::State::serve(grpc::ServerContext* context, EnvStream* stream) {
  struct Count {
    explicit Count(std::atomic<int>* count) : count(*count), now(++*count) {}
    ~Count() { --count; }
    std::atomic<int>& count;
    const int now;
  };
  const Count count(&num_streams);
  grpc::Status status;
  if (!has_token(*context)) {
    status = {grpc::StatusCode::UNAUTHENTICATED,
              "this server wants a token, and the one given is missing or wrong"};
  } else if (count.now > options.max_streams) {
    status = {grpc::StatusCode::RESOURCE_EXHAUSTED,
              "this server has its " + std::to_string(options.max_streams) +
                  " streams already"};
  } else {
    try {
      return run_stream(context, stream);
    } catch (const WireError& error) {
      status = {grpc::StatusCode::INVALID_ARGUMENT, error.what()};
    } catch (const std::exception& error) {
      return write_error(stream, error.what());
    }
  }
  ++num_refused;
  return status;
}

grpc::Status EnvServer::State::write_error(EnvStream* stream,
                                           const std::string& message) {
  wire::EnvMessage error;
  error.mutable_error()->set_message(message);
  stream->Write(encode(error));
  return {grpc::StatusCode::ABORTED, "the environment failed"};
}

grpc::Status EnvServer::State::run_stream(grpc::ServerContext* context,
                                          EnvStream* stream) {
  grpc::ByteBuffer message;
  const Destination none = [](size_t, const ArraySpec&) -> Array {
    throw WireError("an action before the hello");
  };
  {
    const Silent silent(this, context);
    if (!stream->Read(&message)) return grpc::Status::CANCELLED;
    const Decoded decoded = decode_agent_message(&message, none);
    if (decoded.kind != Decoded::kHello) throw WireError("no hello");
    if (decoded.agent_hello.version() != kWireVersion) {
      ++num_refused;
      return {grpc::StatusCode::FAILED_PRECONDITION,
              "this server speaks version " + std::to_string(kWireVersion) +
                  " of the protocol, and the learner version " +
                  std::to_string(decoded.agent_hello.version()) +
                  "; install the same torchbeast on both"};
    }
  }

  MemoryPool pool;
  const auto environment = factory();
  Environment::Row row = environment->reset();
  StreamSpec spec;
  try {
    spec = StreamSpec(environment->hello());
  } catch (const WireError& error) {  // ours, not the peer's
    throw std::runtime_error(std::string("this environment can't be served: ") +
                             error.what());
  }
  const auto write_row = [&] {
    if (row.arrays.size() != spec.arrays.size()) {
      throw std::runtime_error(
          "the environment's rows have changed: " + std::to_string(row.arrays.size()) +
          " arrays, not " + std::to_string(spec.arrays.size()));
    }
    for (size_t i = 0; i < row.arrays.size(); ++i) {
      if (row.arrays[i].spec() != spec.arrays[i]) {
        throw std::runtime_error(
            "the environment's rows have changed: array " + std::to_string(i) + " is " +
            row.arrays[i].spec().to_string() + ", not " + spec.arrays[i].to_string());
      }
    }
    const grpc::ByteBuffer step = encode_step(row.arrays, row.final_observation, pool);
    bytes_sent += step.Length();
    for (const Array& array : row.arrays) bytes_copied += array.num_bytes();
    return stream->Write(step);
  };

  wire::EnvMessage hello;
  *hello.mutable_hello() = environment->hello();
  if (!stream->Write(encode(hello)) || !write_row()) return grpc::Status::CANCELLED;

  const std::vector<ArraySpec> action_specs = spec.action.flatten();
  std::vector<Array> action;
  for (const ArraySpec& wanted : action_specs) action.push_back(pool.allocate(wanted));
  const Destination destination = spec.has_action
                                      ? expect(action_specs, action, "action")
                                      : accept_any(spec.num_envs, pool, &action);
  while (stream->Read(&message)) {
    if (!spec.has_action) action.clear();
    const Decoded decoded = decode_agent_message(&message, destination);
    if (decoded.kind != Decoded::kAction) throw WireError("a second hello");
    if (decoded.num_arrays != action.size() || action.empty()) {
      throw WireError("an action of " + std::to_string(decoded.num_arrays) +
                      " arrays, where the action space has " +
                      std::to_string(spec.has_action ? action.size() : 1));
    }
    row = environment->step(action);
    num_steps += static_cast<uint64_t>(spec.num_envs);
    if (!write_row()) break;
  }
  return grpc::Status::OK;
}

// Ends streams whose peers say nothing.
void EnvServer::State::watch() {
  MutexLock lock(mutex);
  while (!stopping) {
    const auto oldest = Clock::now() - options.hello_timeout;
    for (const auto& [since, context] : silent) {
      if (since <= oldest) context->TryCancel();
    }
    changed.wait_until(mutex, Clock::now() + kInterruptPeriod, nullptr);
  }
}

void EnvServer::State::remove_socket() const {
  struct stat status;
  if (socket_inode != 0 && lstat(address.path().c_str(), &status) == 0 &&
      status.st_ino == socket_inode) {
    unlink(address.path().c_str());
  }
}

// --- The server
// -----------------------------------------------------------------------

EnvServer::EnvServer(EnvironmentFactory factory, EnvServerOptions options)
    : state_(std::make_unique<State>(std::move(factory), std::move(options))) {}

EnvServer::~EnvServer() { stop(); }

void EnvServer::start() {
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
  for_each_argument([&builder](const char* name, int value) {
    builder.AddChannelArgument(name, value);
  });
  // Two servers must not share a port: each would get some of the streams.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             static_cast<int>(state.options.hello_timeout.count()));
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

void EnvServer::run(const Interrupt& interrupt) {
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
  while (!state.stopped) {
    state.changed.wait_until(state.mutex, Clock::now() + kInterruptPeriod, interrupt);
  }
}

void EnvServer::stop() {
  State& state = *state_;
  {
    MutexLock lock(state.mutex);
    state.stopping = true;
  }
  state.changed.notify_all();
  MutexLock lifecycle(state.lifecycle);
  if (state.server != nullptr) {
    state.server->Shutdown(std::chrono::system_clock::now());  // cancels all streams
    state.server->Wait();
    state.server = nullptr;
    state.watcher.join();
    state.remove_socket();
  }
  {
    MutexLock lock(state.mutex);
    state.stopped = true;
  }
  state.changed.notify_all();
}

std::string EnvServer::address() const {
  State& state = *state_;
  MutexLock lock(state.mutex);
  if (state.address.is_unix() || state.port == 0) return state.address.to_string();
  const std::string text = state.address.to_string();
  return text.substr(0, text.rfind(':') + 1) + std::to_string(state.port);
}

EnvServerStats EnvServer::stats() const {
  EnvServerStats stats;
  stats.num_streams = static_cast<uint64_t>(std::max(0, state_->num_streams.load()));
  stats.num_steps = state_->num_steps;
  stats.num_refused = state_->num_refused;
  stats.bytes_sent = state_->bytes_sent;
  stats.bytes_copied = state_->bytes_copied;
  return stats;
}

}  // namespace torchbeast
