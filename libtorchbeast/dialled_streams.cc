// Streams to environment servers that the pool dials.

#include <string>
#include <utility>

#include "pool_streams.h"

namespace torchbeast {

namespace {

// Failed attempts are not logged until so long after the start.
constexpr Milliseconds kQuietStart{5'000};

// The streams of one server, one after the other. One thread.
class DialledStreams {
 public:
  // Of the address with this index.
  DialledStreams(PoolStreams* shared, size_t index)
      : shared_(*shared), index_(index), address_(shared->options.addresses[index]) {}

  // The thread.
  void run() {
    try {
      while (!shared_.closing) {
        was_connected_ = was_cancelled_ = false;
        num_dropped_ = 0;
        act_on(end_of([this] { return run_stream(); }));
        shared_.pause(backoff_.next(was_refused_));
      }
    } catch (...) {
      shared_.fail(std::current_exception());
    }
  }

 private:
  // From dialling until the stream ends.
  End run_stream() {
    DialledConnection connection(address_, shared_.options.security, kStreamMethod,
                                 kPeer);
    PoolStreams::Presence presence(&shared_, &connection);
    std::optional<Unroll> unroll;
    End end = end_of([&] {
      connection.open();
      if (is_trusted_) presence.trust();
      if (!seeding_) seeding_ = shared_.next_seeding(index_, !answered_before_);
      const wire::EnvHello hello = connection.shake_hands(seeding_, true);
      seeding_.reset();  // used
      answered_before_ = true;
      EnvSession session(&shared_.sessions, &connection, hello, [this] {
        if (shared_.closing) throw_over();
      });
      // After the session has checked the rules: all others must be as the first.
      shared_.hellos.check(hello, connection.peer());
      const EnvRow first = session.read_row();
      unroll.emplace(&shared_.sessions.unrolls, session.spec(), first,
                     hello.first_step());
      presence.connect();
      was_connected_ = true;
      set_final(false);
      if (connected_before_) shared_.note_return(connection);
      connected_before_ = true;
      shared_.run_session(session, *unroll, [&](bool finished) {
        presence.step(finished);
        if (finished) backoff_.reset();
      });
    });
    if (end.kind == End::kOver) return end;
    // One that hangs, or never makes a step, is not trusted again until it has made
    // one.
    presence.fail();
    was_cancelled_ = connection.is_cancelled();
    const bool has_failed = was_connected_ || was_cancelled_;
    is_trusted_ = presence.is_proven() || (is_trusted_ && !has_failed);
    // What a run leaves unfinished when it ends was not lost.
    if (unroll && !shared_.closing) num_dropped_ = unroll->num_unfinished_steps();
    shared_.num_dropped_steps += static_cast<uint64_t>(num_dropped_);
    return end;
  }

  void act_on(const End& end) {
    if (shared_.closing) return;
    const std::string peer = std::string(kPeer) + " at " + address_.to_string();
    Event::Kind kind = Event::kRefused;
    std::string text = end.text;
    switch (end.kind) {
      case End::kRefused:
        break;
      case End::kBrokeRules:
        text = peer + " breaks the rules: " + end.text;
        break;
      case End::kNoMemory:
        text = "there is no memory for a rollout of " + peer + ": " + end.text;
        break;
      case End::kRaised:
        kind = Event::kEnvError;
        break;
      case End::kLost:
        kind = Event::kLost;
        break;
      case End::kOver:
        return shared_.close();
      default:  // nothing that a server has done
        return shared_.fail(end.error);
    }
    // Attempts that fail one after the other are one event.
    const bool is_news = was_connected_ || (text != last_text_ &&
                                            (kind != Event::kLost || was_cancelled_ ||
                                             Clock::now() - began_ > kQuietStart));
    if (is_news) last_text_ = text;
    shared_.note(text);
    if (kind == Event::kRefused) ++shared_.num_refused;
    if (num_dropped_ > 0) {
      text += "\n" + std::to_string(num_dropped_) + " steps are dropped";
    }
    if (is_news) shared_.events.add(kind, text);
    was_refused_ = kind == Event::kRefused;
    set_final(end.kind == End::kRefused);
    if (end.kind == End::kRaised) shared_.count_failure(end.text, address_.to_string());
  }

  void set_final(bool is_final) {
    if (std::exchange(is_final_, is_final) == is_final) return;
    MutexLock lock(shared_.mutex);
    shared_.num_refusing += is_final ? 1 : -1;
  }

  static constexpr char kPeer[] = "the environment server";

  PoolStreams& shared_;
  const size_t index_;
  const Address address_;

  // Of this thread alone.
  std::optional<wire::Seeding> seeding_;  // of the next stream
  bool answered_before_ = false;
  const Clock::time_point began_ = Clock::now();
  bool connected_before_ = false;
  bool is_trusted_ = true;
  bool is_final_ = false;
  std::string last_text_;
  Backoff backoff_;
  // Of the last connection.
  bool was_connected_ = false;
  bool was_cancelled_ = false;  // because it hung
  bool was_refused_ = false;
  int64_t num_dropped_ = 0;
};

}  // namespace

void run_dialled(PoolStreams* shared, size_t index) {
  DialledStreams(shared, index).run();
}

}  // namespace torchbeast
