#include "listener.h"

#include <algorithm>
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
  End serve(ServedConnection& connection) TB_EXCLUDES(mutex);
  wire::EnvHello shake_hands(Connection* connection) TB_EXCLUDES(mutex);
  // The host, in whose hands a stream is until this is destroyed; null if there is
  // none.
  using Hosted = std::unique_ptr<StreamHost, std::function<void(StreamHost*)>>;
  Hosted enter_host(const KnownHello* hello) TB_REQUIRES(mutex);
  void refuse_if_over() TB_REQUIRES(mutex);
  std::optional<wire::Seeding> next_seeding();
  using Hello = std::shared_ptr<const KnownHello>;
  // A stream that has shaken hands.
  struct Greeted {
    Hello hello;
    bool has_measure = false;  // if there is a measure
  };
  // Whether it is as the measure, which it becomes if there is none; otherwise it has
  // to wait, or is refused if the run has settled.
  bool conforms(const Greeted& stream) TB_REQUIRES(mutex);
  void set_measure(Hello hello) TB_REQUIRES(mutex);
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
  // A pool has ended, and no other is there.
  bool detached TB_GUARDED_BY(mutex) = false;
  StreamHost* host TB_GUARDED_BY(mutex) = nullptr;
  int num_hosted TB_GUARDED_BY(mutex) = 0;  // streams in the host's hands
  Hello measure TB_GUARDED_BY(mutex);
  bool is_settled TB_GUARDED_BY(mutex) = false;
  std::list<Greeted> greeted TB_GUARDED_BY(mutex);
  Hello unusable TB_GUARDED_BY(mutex);  // the last that refuse() got
  std::string why_unusable TB_GUARDED_BY(mutex);
  std::string last_refusal TB_GUARDED_BY(mutex);

  StreamServer server;  // the first to end
};

// --- One stream

End Listener::State::serve(ServedConnection& connection) {
  Hello hello;
  Hosted hosted;
  try {
    hello = std::make_shared<KnownHello>(shake_hands(&connection), connection.peer());
  } catch (const EnvironmentError&) {  // in place of the hello
    const End end = end_of(std::current_exception());
    note(Event::kEnvError, end.text);
    {
      MutexLock lock(mutex);
      hosted = enter_host(nullptr);
    }
    if (hosted) hosted->count_failure(end.text, connection.origin());
    return end;
  }
  std::list<Greeted>::iterator own;
  {
    MutexLock lock(mutex);
    own = greeted.insert(greeted.end(), {hello});
    own->has_measure = measure != nullptr && hello->is_alike(*measure);
  }
  // After the host's work. The measure may be this stream's until then.
  const AtEnd removal([&] {
    MutexLock lock(mutex);
    greeted.erase(own);
    const auto has_measure = [](const Greeted& other) { return other.has_measure; };
    if (!is_settled && std::none_of(greeted.begin(), greeted.end(), has_measure)) {
      measure.reset();
      changed.notify_all();
    }
  });
  const auto check = [&connection] {
    if (connection.is_gone()) {
      throw TransportError(connection.peer() + " is lost");
    }
  };
  Hello other;  // the measure, if this one is refused
  {
    MutexLock lock(mutex);
    while (true) {
      refuse_if_over();
      if (conforms(*own)) {
        hosted = enter_host(hello.get());
      } else if (is_settled) {
        other = measure;
      }
      if (hosted || other) break;
      changed.wait_until(mutex, Clock::now() + kLookPeriod, check);
    }
  }
  if (other) hello->refuse(*other);
  const Hosted host = std::move(hosted);  // leaves it before the removal
  return host->serve(connection, hello->hello());
}

Listener::State::Hosted Listener::State::enter_host(const KnownHello* hello) {
  if (host == nullptr || (hello != nullptr && !host->wants(*hello))) return nullptr;
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
  {
    MutexLock lock(mutex);
    refuse_if_over();
  }
  const wire::EnvHello hello = connection->shake_hands(next_seeding(), true);
  expected.check(hello, connection->peer());
  return hello;
}

bool Listener::State::conforms(const Greeted& stream) {
  if (unusable && unusable->is_alike(*stream.hello)) throw RefusedError(why_unusable);
  const std::string& name = stream.hello->hello().environment();
  // The measure's may be left out.
  if (!measure ||
      (stream.has_measure && measure->hello().environment().empty() && !name.empty())) {
    set_measure(stream.hello);
  }
  return stream.has_measure;
}

void Listener::State::set_measure(Hello hello) {
  measure = std::move(hello);
  for (Greeted& stream : greeted) {
    stream.has_measure = stream.hello->is_alike(*measure);
  }
  changed.notify_all();
}

void Listener::State::refuse_if_over() {
  if (closing || detached) throw_over();
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

wire::EnvHello Listener::probe(Milliseconds timeout, const Interrupt& interrupt) {
  State& state = *state_;
  const auto deadline = time_after(timeout);
  MutexLock lock(state.mutex);
  while (!state.measure) {
    if (state.closing) throw TransportError("the listener has been closed");
    if (Clock::now() >= deadline) {
      std::string text = "no environment has joined at " + state.server.address() +
                         " within " + in_seconds(timeout);
      if (!state.last_refusal.empty()) {
        text += "; the last that was refused: " + state.last_refusal;
      }
      throw TransportError(text);
    }
    state.changed.wait_until(state.mutex, deadline, interrupt);
  }
  return state.measure->hello();
}

std::optional<wire::Seeding> Listener::next_seeding() { return state_->next_seeding(); }

void Listener::refuse(const wire::EnvHello& hello, const std::string& reason) {
  const auto known = std::make_shared<KnownHello>(hello, "");
  {
    MutexLock lock(state_->mutex);
    state_->unusable = known;
    state_->why_unusable = reason;
    state_->measure.reset();
  }
  state_->changed.notify_all();
}

void Listener::settle(const wire::EnvHello& hello) {
  {
    MutexLock lock(state_->mutex);
    if (state_->is_settled) return;
  }
  const auto known = std::make_shared<KnownHello>(hello, "those of this run");
  MutexLock lock(state_->mutex);
  if (state_->is_settled) return;  // in between
  if (!state_->measure || !known->is_alike(*state_->measure)) {
    state_->set_measure(known);
  }
  state_->is_settled = true;
  state_->changed.notify_all();
}

bool Listener::wants_other(const wire::EnvHello& hello) const {
  const KnownHello known(hello, "");
  MutexLock lock(state_->mutex);
  return state_->measure && !known.is_alike(*state_->measure);
}

void Listener::pass_over() {
  MutexLock lock(state_->mutex);
  if (!state_->measure || state_->is_settled) return;
  for (const State::Greeted& stream : state_->greeted) {
    if (!stream.has_measure) return state_->set_measure(stream.hello);
  }
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
    state_->detached = false;
  }
  state_->changed.notify_all();
}

void Listener::detach(bool has_failed) {
  State& state = *state_;
  MutexLock lock(state.mutex);
  state.host = nullptr;
  state.detached = std::exchange(state.is_settled, false) || has_failed;
  state.changed.notify_all();
  while (state.num_hosted > 0) {
    state.changed.wait_until(state.mutex, Clock::now() + kLookPeriod, nullptr);
  }
}

}  // namespace torchbeast
