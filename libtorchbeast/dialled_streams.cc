#include "dialled_streams.h"

#include <string>
#include <utility>

#include "collector.h"

namespace torchbeast {

namespace {

// Failed attempts are not logged until so long after the start.
constexpr Milliseconds kQuietStart{5'000};

constexpr char kPeer[] = "the environment server";

}  // namespace

DialledStreams::DialledStreams(PoolStreams* shared, size_t index)
    : shared_(*shared),
      index_(index),
      address_(shared->options.addresses[index]),
      thread_([this] { run(); }) {}

void DialledStreams::run() {
  try {
    while (!shared_.is_closing()) {
      act_on(end_of([this] { return run_stream(); }));
      shared_.pause(backoff_.next(was_refused_));
    }
  } catch (...) {
    shared_.end(std::current_exception());
  }
}

End DialledStreams::run_stream() {
  was_connected_ = was_cancelled_ = false;
  num_dropped_ = 0;
  DialledConnection connection(address_, shared_.options.security, kStreamMethod,
                               kPeer);
  PoolStreams::Presence presence(&shared_, &connection);
  std::optional<Unroll> unroll;
  const End end = end_of([&] { this->unroll(connection, presence, &unroll); });
  if (end.kind == End::kOver) return end;
  was_cancelled_ = connection.is_cancelled();
  // What a run leaves unfinished when it ends was not lost.
  if (unroll && !shared_.is_closing()) num_dropped_ = unroll->num_unfinished_steps();
  shared_.num_dropped_steps += static_cast<uint64_t>(num_dropped_);
  return end;
}

void DialledStreams::unroll(DialledConnection& connection,
                            PoolStreams::Presence& presence,
                            std::optional<Unroll>* unroll) {
  connection.open();
  presence.trust();
  if (!seeding_) seeding_ = shared_.next_seeding(index_, !answered_before_);
  const wire::EnvHello hello = connection.shake_hands(seeding_, true);
  seeding_.reset();  // used
  answered_before_ = true;
  EnvSession session(&shared_.sessions, &connection, hello, [this] {
    if (shared_.is_closing()) throw_over();
  });
  // After the session has checked the rules: all others must be as the first.
  shared_.hellos.check(hello, connection.peer());
  const EnvRow first = session.read_row();
  unroll->emplace(&shared_.sessions.unrolls, session.spec(), first, hello.first_step());
  presence.connect();
  was_connected_ = true;
  set_final(false);
  if (connected_before_) shared_.note_return(connection);
  connected_before_ = true;
  run_session(session, **unroll, [&](bool finished) {
    presence.step(finished);
    if (finished) backoff_.reset();
  });
}

void DialledStreams::act_on(const End& end) {
  if (end.kind == End::kFailed) return shared_.end(end.error);
  if (shared_.is_closing()) return;
  const std::string peer = std::string(kPeer) + " at " + address_.to_string();
  Event::Kind kind = Event::kRefused;
  std::string text = end.text;
  switch (end.kind) {
    case End::kRefused:
      if (text.find(address_.to_string()) == std::string::npos) {
        text = peer + ": " + text;
      }
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
      return shared_.end();
    default:  // nothing that a server has done
      return shared_.end(end.error);
  }
  // Attempts that fail one after the other are one event.
  const bool is_news = was_connected_ ||
                       (text != last_text_ && (kind != Event::kLost || was_cancelled_ ||
                                               Clock::now() - began_ > kQuietStart));
  if (is_news) last_text_ = text;
  shared_.note(text);
  if (kind == Event::kRefused) ++shared_.num_refused;
  // Environments that break a rule count as those that raise.
  const bool has_failed =
      end.kind == End::kRaised || (end.kind == End::kBrokeRules && was_connected_);
  if (has_failed) shared_.count_failure(text, address_.to_string());
  if (num_dropped_ > 0) {
    text += "\n" + std::to_string(num_dropped_) + " steps are dropped";
  }
  if (is_news) shared_.events.add(kind, text);
  was_refused_ = kind == Event::kRefused && !has_failed;
  set_final(end.kind == End::kRefused);
}

void DialledStreams::set_final(bool is_final) {
  if (std::exchange(is_final_, is_final) == is_final) return;
  shared_.count_refusing(is_final);
}

}  // namespace torchbeast
