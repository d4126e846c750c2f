#include "listener.h"

#include <atomic>
#include <optional>
#include <utility>

#include "stream_spec.h"

namespace torchbeast {

namespace {

// Clears the fields that are the same in both.
void keep_differing(wire::EnvHello* a, wire::EnvHello* b) {
  const auto same = [&](auto get) {
    return get(*a).SerializeAsString() == get(*b).SerializeAsString();
  };
  if (a->environment() == b->environment()) {
    a->clear_environment();
    b->clear_environment();
  }
  if (a->num_envs() == b->num_envs()) {
    a->clear_num_envs();
    b->clear_num_envs();
  }
  a->clear_version();
  b->clear_version();
  if (same([](const wire::EnvHello& hello) { return hello.observation_space(); })) {
    a->clear_observation_space();
    b->clear_observation_space();
  }
  if (same([](const wire::EnvHello& hello) { return hello.action_space(); })) {
    a->clear_action_space();
    b->clear_action_space();
  }
}

// The hello without stream_id and settings: equal for environments of one kind.
std::string without_identity(wire::EnvHello hello) {
  hello.clear_settings();
  hello.clear_stream_id();
  hello.clear_first_step();
  return hello.SerializeAsString();
}

// Short enough for the status of a call.
std::string short_text(const wire::EnvHello& hello) {
  constexpr size_t kMax = 1000;
  const std::string text = hello.ShortDebugString();
  return text.size() > kMax ? text.substr(0, kMax) + "..." : text;
}

}  // namespace

struct Listener::State {
  explicit State(ListenerOptions options)
      : max_streams(options.max_streams),
        seed(options.seed),
        expected(std::move(options.expected)),
        server(
            kJoinMethod,
            [this](grpc::ServerContext* context, ServedStream* stream) {
              return serve(context, stream);
            },
            with_more_streams(std::move(options)),
            [this](const std::string& peer, const grpc::Status& status) {
              note(Event::kRefused, peer + ": " + status.error_message());
            }) {}

  // An environment may come back before its old connection is gone.
  static StreamServerOptions with_more_streams(StreamServerOptions options) {
    options.max_streams *= 2;
    return options;
  }
  grpc::Status serve(grpc::ServerContext* context, ServedStream* stream)
      TB_EXCLUDES(mutex);
  grpc::Status run_stream(grpc::ServerContext* context, ServedStream* stream)
      TB_EXCLUDES(mutex);
  wire::EnvHello shake_hands(grpc::ServerContext* context, Connection* connection)
      TB_EXCLUDES(mutex);
  void refuse_if_over() TB_REQUIRES(mutex);
  std::optional<wire::Seeding> next_seeding();
  // For probe(), or a refusal.
  void propose(const wire::EnvHello& hello) TB_REQUIRES(mutex);
  void note(Event::Kind kind, const std::string& text) TB_EXCLUDES(mutex) {
    events.add(kind, text);
    MutexLock lock(mutex);
    last_refusal = text;
  }

  const int max_streams;
  const std::optional<uint64_t> seed;
  const ExpectedEnvironment expected;
  std::atomic<uint64_t> num_seeded{0};
  EventLog events;

  Mutex mutex;
  CondVar changed;
  bool closing TB_GUARDED_BY(mutex) = false;
  bool detached TB_GUARDED_BY(mutex) =
      false;  // a pool has ended, and no other is there
  Host host TB_GUARDED_BY(mutex);
  OnError on_error TB_GUARDED_BY(mutex);
  int num_hosted TB_GUARDED_BY(mutex) = 0;  // streams in the host's hands
  std::optional<wire::EnvHello> first_hello TB_GUARDED_BY(mutex);  // for probe()
  std::string unusable TB_GUARDED_BY(mutex);  // the last that refuse() got
  std::string why_unusable TB_GUARDED_BY(mutex);
  std::string last_refusal TB_GUARDED_BY(mutex);

  StreamServer server;  // the first to end
};

// --- One stream

grpc::Status Listener::State::serve(grpc::ServerContext* context,
                                    ServedStream* stream) {
  try {
    return run_stream(context, stream);
  } catch (const Connection::Left&) {
    return grpc::Status::OK;
  } catch (const EnvironmentError& error) {  // in place of the hello
    note(Event::kEnvError, error.what());
    OnError tell;
    {
      MutexLock lock(mutex);
      tell = on_error;
      if (tell) ++num_hosted;
    }
    if (tell) {
      tell(error);
      {
        MutexLock lock(mutex);
        --num_hosted;
      }
      changed.notify_all();
    }
    return grpc::Status::OK;
  }
}

grpc::Status Listener::State::run_stream(grpc::ServerContext* context,
                                         ServedStream* stream) {
  ServedConnection connection(context, stream, "the environment that has joined from");
  const wire::EnvHello hello = shake_hands(context, &connection);

  // While it lives, a stream is in the host's hands.
  class Hosted {
   public:
    Hosted(State* state, const ServedConnection& connection,
           const wire::EnvHello& hello)
        : state_(*state) {
      MutexLock lock(state_.mutex);
      while (true) {
        state_.refuse_if_over();
        state_.propose(hello);
        if (state_.host) break;
        state_.changed.wait_until(state_.mutex, Clock::now() + kLookPeriod, [&] {
          if (connection.is_lost()) {
            throw TransportError(connection.peer() + " is lost", true);
          }
        });
      }
      host = state_.host;
      ++state_.num_hosted;
    }
    ~Hosted() {
      {
        MutexLock lock(state_.mutex);
        --state_.num_hosted;
      }
      state_.changed.notify_all();
    }
    Hosted(const Hosted&) = delete;
    Host host;

   private:
    State& state_;
  };
  const Hosted hosted(this, connection, hello);
  return hosted.host(connection, hello);
}

wire::EnvHello Listener::State::shake_hands(grpc::ServerContext* context,
                                            Connection* connection) {
  {
    MutexLock lock(mutex);
    refuse_if_over();
  }
  wire::EnvHello hello;
  {
    const StreamServer::HelloDeadline deadline(&server, context);
    hello = connection->shake_hands(next_seeding());
  }
  const StreamSpec valid(hello);
  expected.check(hello, connection->peer());
  return hello;
}

void Listener::State::propose(const wire::EnvHello& hello) {
  if (!unusable.empty() && without_identity(hello) == unusable) {
    throw RefusedError(why_unusable);
  }
  if (first_hello) return;
  first_hello = hello;
  changed.notify_all();
}

void Listener::State::refuse_if_over() {
  if (closing || detached) {
    throw TransportError("this learner is about to end", true);
  }
}

std::optional<wire::Seeding> Listener::State::next_seeding() {
  if (!seed) return std::nullopt;
  wire::Seeding seeding;
  seeding.set_seed(*seed);
  seeding.set_stream(num_seeded++);
  return seeding;
}

// --- The listener

Listener::Listener(ListenerOptions options)
    : state_(std::make_shared<State>(std::move(options))) {}

Listener::~Listener() { close(); }

void Listener::start() { state_->server.start(); }

void Listener::close() {
  {
    MutexLock lock(state_->mutex);
    state_->closing = true;
  }
  state_->changed.notify_all();
  state_->server.stop(kNever, state_);
}

bool Listener::is_closed() const {
  MutexLock lock(state_->mutex);
  return state_->closing;
}

std::string Listener::address() const { return state_->server.address(); }

int Listener::max_streams() const { return state_->max_streams; }

ListenerStats Listener::stats() const {
  ListenerStats stats;
  stats.num_streams = state_->server.num_streams();
  stats.num_refused = state_->server.num_refused();
  MutexLock lock(state_->mutex);
  stats.last_refusal = state_->last_refusal;
  return stats;
}

wire::EnvHello Listener::probe(Milliseconds timeout, const Interrupt& interrupt) {
  State& state = *state_;
  const auto deadline = time_after(timeout);
  MutexLock lock(state.mutex);
  while (!state.first_hello) {
    if (state.closing) throw TransportError("the listener has been closed", false);
    if (Clock::now() >= deadline) {
      std::string text = "no environment has joined at " + state.server.address() +
                         " within " + in_seconds(timeout);
      if (!state.last_refusal.empty()) {
        text += "; the last that was refused: " + state.last_refusal;
      }
      throw TransportError(text, true);
    }
    state.changed.wait_until(state.mutex, deadline, interrupt);
  }
  return *state.first_hello;
}

std::optional<wire::Seeding> Listener::next_seeding() { return state_->next_seeding(); }

void Listener::refuse(const wire::EnvHello& hello, const std::string& reason) {
  {
    MutexLock lock(state_->mutex);
    state_->unusable = without_identity(hello);
    state_->why_unusable = reason;
    state_->first_hello.reset();
  }
  state_->changed.notify_all();
}

EventLog& Listener::events() { return state_->events; }

void Listener::attach(Host host, OnError on_error) {
  {
    MutexLock lock(state_->mutex);
    if (state_->host) {
      throw std::invalid_argument("the listener at " + state_->server.address() +
                                  " has a pool already");
    }
    state_->host = std::move(host);
    state_->on_error = std::move(on_error);
    state_->detached = false;
  }
  state_->changed.notify_all();
}

void Listener::detach() {
  State& state = *state_;
  MutexLock lock(state.mutex);
  state.host = nullptr;
  state.on_error = nullptr;
  state.detached = true;
  state.changed.notify_all();
  while (state.num_hosted > 0) {
    state.changed.wait_until(state.mutex, Clock::now() + kLookPeriod, nullptr);
  }
}

// --- Hellos

void HelloCheck::check(const wire::EnvHello& hello, const std::string& peer) {
  expected_.check(hello, peer);
  const std::string bytes = without_identity(hello);
  MutexLock lock(mutex_);
  if (first_.empty()) {
    first_ = bytes;
    first_peer_ = peer;
  } else if (bytes != first_) {
    wire::EnvHello first;
    wire::EnvHello what;
    first.ParseFromString(first_);
    what.ParseFromString(bytes);
    keep_differing(&first, &what);
    throw RefusedError(first_peer_ + " and " + peer +
                       " differ, and the environments of one run must not. The "
                       "first: " +
                       short_text(first) + ". The second: " + short_text(what));
  }
}

}  // namespace torchbeast
