// Streams to environment servers that the pool dials.

#include <algorithm>
#include <new>
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
      while (true) {
        try_stream();
        shared_.pause(backoff_.next(was_refused_));
        if (shared_.closing) throw Stopped();
      }
    } catch (const Stopped&) {
      shared_.close();
    } catch (const ClosedBatchingQueue&) {
      shared_.close();
    } catch (...) {
      shared_.fail(std::current_exception());
    }
  }

 private:
  // Until the stream ends by the other side's fault; what is thrown is this side's.
  void try_stream() {
    was_connected_ = was_cancelled_ = false;
    num_dropped_ = 0;
    try {
      run_stream();
    } catch (const EnvironmentError& error) {
      after(Event::kEnvError, error.what(), false);
      shared_.count_failure(error, address_.to_string());
    } catch (const WireError& error) {
      after(Event::kRefused,
            "the environment server at " + address_.to_string() +
                " breaks the rules: " + error.what(),
            false);
    } catch (const TooManyBytes& error) {
      after(Event::kRefused, no_memory() + ": " + error.what(), false);
    } catch (const std::bad_alloc&) {
      after(Event::kRefused, no_memory(), false);
    } catch (const TransportError& error) {
      after(error.may_pass ? Event::kLost : Event::kRefused, error.what(),
            !error.may_pass);
    }
  }

  std::string no_memory() const {
    return "there is no memory for a rollout of the environment server at " +
           address_.to_string();
  }

  // `is_final`: the server refuses this learner for good.
  void after(Event::Kind kind, std::string text, bool is_final) {
    if (shared_.closing) throw Stopped();
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
    set_final(is_final);
    was_refused_ = kind == Event::kRefused;
  }

  void set_final(bool is_final) {
    if (std::exchange(is_final_, is_final) == is_final) return;
    MutexLock lock(shared_.mutex);
    shared_.num_refusing += is_final ? 1 : -1;
  }

  // From dialling until the stream is lost.
  void run_stream() {
    DialledConnection connection(address_, shared_.options.security, kStreamMethod,
                                 "the environment server");
    PoolStreams::Presence presence(&shared_, &connection);
    std::optional<Unroll> unroll;
    try {
      connection.open();
      if (is_trusted_) presence.trust();
      if (!seeding_) seeding_ = shared_.next_seeding(index_, !answered_before_);
      const wire::EnvHello hello = connection.shake_hands(seeding_, true);
      seeding_.reset();  // used
      answered_before_ = true;
      EnvSession session(&shared_.sessions, &connection, hello, [this] {
        if (shared_.closing) throw Stopped();
      });
      // After the session has checked the rules: all others must be as the first.
      shared_.hellos.check(hello, connection.peer());
      const EnvRow first = session.read_row();
      unroll.emplace(&shared_.sessions.unrolls, session.spec(), first,
                     hello.first_step());
      presence.connect();
      was_connected_ = true;
      set_final(false);
      if (connected_before_) {
        ++shared_.num_reconnects;
        shared_.events.add(Event::kReturned, connection.peer());
      }
      connected_before_ = true;
      shared_.run_session(session, *unroll, [&](bool finished) {
        presence.prove();
        if (!finished) return;
        presence.deliver();
        backoff_.reset();
      });
    } catch (const ClosedBatchingQueue&) {
      throw;
    } catch (...) {
      // One that hangs, or never makes a step, is not trusted again until it has made
      // one.
      presence.fail();
      was_cancelled_ = connection.is_cancelled();
      const bool has_failed = was_connected_ || was_cancelled_;
      is_trusted_ = presence.is_proven() || (is_trusted_ && !has_failed);
      // What a run leaves unfinished when it ends was not lost.
      if (unroll && !shared_.closing) num_dropped_ = unroll->num_unfinished_steps();
      shared_.num_dropped_steps += static_cast<uint64_t>(num_dropped_);
      throw;
    }
  }

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
