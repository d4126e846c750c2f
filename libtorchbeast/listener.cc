#include "listener.h"

#include <atomic>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

namespace torchbeast {

namespace {

constexpr Milliseconds kLongestEnd = std::chrono::seconds(5);

}  // namespace

struct Listener::State {
  explicit State(ListenerOptions options)
      : max_streams(options.max_streams),
        seed(options.seed),
        expected(std::move(options.expected)),
        server(
            kJoinMethod, "the environment that has joined from",
            [this](ServedConnection& connection) { return serve(connection); },
            with_more_streams(std::move(options)),
            [this](const std::string& peer, const std::string& text) {
              const bool has_name = text.compare(0, peer.size(), peer) == 0;
              note(Event::kRefused, has_name ? text : peer + ": " + text);
            }) {}

  // An environment may come back before its old connection is gone.
  static StreamServerOptions with_more_streams(StreamServerOptions options) {
    constexpr int kMost = std::numeric_limits<int>::max() / 2;
    if (options.max_streams < 1 || options.max_streams > kMost) {
      throw std::invalid_argument("max_streams must be 1 to " + std::to_string(kMost) +
                                  ", got " + std::to_string(options.max_streams));
    }
    options.max_streams *= 2;
    return options;
  }
  using Hello = std::shared_ptr<const KnownHello>;
  End serve(ServedConnection& connection) TB_EXCLUDES(mutex);
  wire::EnvHello shake_hands(Connection* connection) TB_EXCLUDES(mutex);
  // The host, in whose hands a stream is until this is destroyed; null if there is
  // none.
  using Hosted = std::unique_ptr<StreamHost, std::function<void(StreamHost*)>>;
  Hosted enter_host() TB_REQUIRES(mutex);
  // The same, once there is one. Throws that the environment is refused or lost.
  Hosted wait_for_host(const ServedConnection& connection, const Hello& hello)
      TB_EXCLUDES(mutex);
  bool is_unusable(const Hello& hello) const TB_REQUIRES(mutex) {
    return unusable && unusable->is_alike(*hello);
  }
  std::optional<wire::Seeding> next_seeding();
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
  std::atomic<bool> closing{false};  // written under the mutex, for sleepers
  StreamHost* host TB_GUARDED_BY(mutex) = nullptr;
  int num_hosted TB_GUARDED_BY(mutex) = 0;        // streams in the host's hands
  std::list<Hello> waiting TB_GUARDED_BY(mutex);  // for a host
  Hello unusable TB_GUARDED_BY(mutex);            // the last that refuse() got
  std::string why_unusable TB_GUARDED_BY(mutex);
  std::string last_refusal TB_GUARDED_BY(mutex);

  StreamServer server;  // the first to end
};

// --- One stream

End Listener::State::serve(ServedConnection& connection) {
  Hello hello;
  try {
    hello = std::make_shared<KnownHello>(shake_hands(&connection), connection.peer());
  } catch (const EnvironmentError&) {  // in place of the hello
    const End end = end_of(std::current_exception());
    note(Event::kEnvError, end.text);
    Hosted hosted;
    {
      MutexLock lock(mutex);
      hosted = enter_host();
    }
    if (hosted) hosted->count_failure(end.text, connection.origin());
    return end;
  }
  return wait_for_host(connection, hello)->serve(connection, hello->hello());
}

Listener::State::Hosted Listener::State::wait_for_host(
    const ServedConnection& connection, const Hello& hello) {
  const auto check = [&connection] {
    if (connection.is_gone()) {
      throw TransportError(connection.peer() + " is lost");
    }
  };
  std::list<Hello>::iterator own;
  {
    MutexLock lock(mutex);
    own = waiting.insert(waiting.end(), hello);
  }
  const AtEnd removal([&] {
    MutexLock lock(mutex);
    waiting.erase(own);
  });
  changed.notify_all();
  MutexLock lock(mutex);
  while (true) {
    if (closing) throw_over();
    if (is_unusable(hello)) throw RefusedError(why_unusable);
    if (Hosted hosted = enter_host()) return hosted;
    changed.wait_until(mutex, Clock::now() + kLookPeriod, check);
  }
}

Listener::State::Hosted Listener::State::enter_host() {
  if (host == nullptr) return nullptr;
  ++num_hosted;
  return Hosted(host, [this](StreamHost*) {
    {
      MutexLock lock(mutex);
      --num_hosted;
    }
    changed.notify_all();
  });
}

wire::EnvHello Listener::State::shake_hands(Connection* connection) {
  if (closing) throw_over();
  const wire::EnvHello hello = connection->shake_hands(next_seeding(), true);
  expected.check(hello, connection->peer());
  return hello;
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
  // gRPC has to answer all calls that wait, which a flood of calls and a lack of
  // threads can delay for minutes.
  state_->server.stop(kLongestEnd, state_);
}

void Listener::finish() { state_->server.finish(); }

bool Listener::is_closed() const { return state_->closing; }

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

wire::EnvHello Listener::probe(Milliseconds timeout, const Interrupt& interrupt,
                               const std::optional<wire::EnvHello>& other_than) {
  State& state = *state_;
  const auto deadline = time_after(timeout);
  std::optional<KnownHello> avoided;
  if (other_than) avoided.emplace(*other_than, "");
  MutexLock lock(state.mutex);
  while (true) {
    const bool is_late = Clock::now() >= deadline;
    for (const State::Hello& hello : state.waiting) {
      const bool is_avoided = !is_late && avoided && avoided->is_alike(*hello);
      if (!is_avoided && !state.is_unusable(hello)) return hello->hello();
    }
    if (state.closing) throw TransportError("the listener has been closed");
    if (is_late) {
      std::string text = "no environment has joined at " + state.server.address() +
                         " within " + in_seconds(timeout);
      if (!state.last_refusal.empty()) {
        text += "; the last that was refused: " + state.last_refusal;
      }
      throw TransportError(text);
    }
    state.changed.wait_until(state.mutex, deadline, interrupt);
  }
}

std::optional<wire::Seeding> Listener::next_seeding() { return state_->next_seeding(); }

void Listener::refuse(const wire::EnvHello& hello, const std::string& reason) {
  const auto known = std::make_shared<KnownHello>(hello, "");
  {
    MutexLock lock(state_->mutex);
    state_->unusable = known;
    state_->why_unusable = reason;
  }
  state_->changed.notify_all();
}

EventLog& Listener::events() { return state_->events; }

void Listener::attach(StreamHost* host) {
  {
    MutexLock lock(state_->mutex);
    if (state_->host != nullptr) {
      throw std::invalid_argument("the listener at " + state_->server.address() +
                                  " has a pool already");
    }
    state_->host = host;
  }
  state_->changed.notify_all();
}

void Listener::detach() {
  State& state = *state_;
  MutexLock lock(state.mutex);
  state.host = nullptr;
  while (state.num_hosted > 0) {
    state.changed.wait_until(state.mutex, Clock::now() + kLookPeriod, nullptr);
  }
}

}  // namespace torchbeast
