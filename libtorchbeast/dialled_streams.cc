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

// --- Of run()'s thread

DialledStreams::~DialledStreams() {
  thread_.join();  // may still give a stream to the collector
  std::exception_ptr error;
  {
    MutexLock lock(shared_.mutex);
    while (place_ == kAway) {
      shared_.changed.wait_until(shared_.mutex, Clock::now() + kLookPeriod, nullptr);
    }
    if (back_) error = *back_;
  }
  if (error && end_of(error).kind == End::kFailed) shared_.end(error);
}

void DialledStreams::attend() {
  std::optional<std::exception_ptr> back;
  Place place;
  {
    MutexLock lock(shared_.mutex);
    place = place_;
    back = back_;
    if (place_ == kIdle) place_ = kHere;
  }
  if (place == kAway) thread_.join();  // it has nothing to do any more
  if (place != kIdle) return;
  try {
    thread_ = Thread([this, back] { run(back); });
    has_begun_ = true;
  } catch (const std::exception& error) {
    {
      MutexLock lock(shared_.mutex);
      place_ = kIdle;
    }
    if (!has_begun_) throw;
    if (stream_) stream_->presence.rest();
    shared_.note(error.what());
  }
}

// --- The thread

DialledStreams::Stream::Stream(PoolStreams* shared, const Address& address)
    : connection(address, shared->options.security, kStreamMethod, kPeer),
      presence(shared, &connection) {}

void DialledStreams::run(std::optional<std::exception_ptr> back) {
  try {
    while (!shared_.closing) {
      bool is_away = false;
      const End end = end_of([&] {
        if (!back) {
          open();
        } else if (const auto error = *std::exchange(back, std::nullopt)) {
          std::rethrow_exception(error);
        } else {
          receive_and_act();
        }
        hand_over();
        is_away = true;
      });
      if (is_away) return;
      close(end);
      act_on(end);
      shared_.pause(backoff_.next(was_refused_));
    }
  } catch (...) {
    shared_.end(std::current_exception());
  }
}

void DialledStreams::open() {
  was_connected_ = was_cancelled_ = false;
  num_dropped_ = 0;
  stream_.emplace(&shared_, address_);
  DialledConnection& connection = stream_->connection;
  connection.open();
  if (is_trusted_) stream_->presence.trust();
  if (!seeding_) seeding_ = shared_.next_seeding(index_, !answered_before_);
  const wire::EnvHello hello = connection.shake_hands(seeding_, true);
  seeding_.reset();  // used
  answered_before_ = true;
  EnvSession& session = stream_->session.emplace(&shared_.sessions, &connection, hello,
                                                 [shared = &shared_] {
                                                   if (shared->closing) throw_over();
                                                 });
  // After the session has checked the rules: all others must be as the first.
  shared_.hellos.check(hello, connection.peer());
  const EnvRow first = session.read_row();
  stream_->unroll.emplace(&shared_.sessions.unrolls, session.spec(), first,
                          hello.first_step());
  stream_->presence.connect();
  was_connected_ = true;
  set_final(false);
  if (connected_before_) shared_.note_return(connection);
  connected_before_ = true;
  session.act(&*stream_->unroll);
}

void DialledStreams::receive_and_act() {
  stream_->session->receive(&*stream_->unroll);
  on_step(stream_->session->act(&*stream_->unroll));
}

void DialledStreams::hand_over() {
  while (!stream_->connection.has_lane()) {
    stream_->session->send_action(&*stream_->unroll);
    receive_and_act();
  }
  {
    MutexLock lock(shared_.mutex);
    place_ = kAway;
  }
  const auto come_back = [this](std::exception_ptr error) {
    MutexLock lock(shared_.mutex);
    back_ = std::move(error);
    place_ = kIdle;
    ++shared_.num_news;
    shared_.changed.notify_all();
    shared_.has_news.notify_all();
  };
  try {
    Collector::instance().start(
        &*stream_->session, &*stream_->unroll,
        [this](bool finished) { on_step(finished); }, come_back);
  } catch (...) {  // this thread ends all the same: run() may wait for it
    come_back(std::current_exception());
  }
}

void DialledStreams::on_step(bool finished) {
  stream_->presence.step(finished);
  if (finished) backoff_.reset();
}

void DialledStreams::close(const End& end) {
  if (stream_ && end.kind != End::kOver) {
    // One that hangs, or never makes a step, is not trusted again until it has made
    // one.
    stream_->presence.fail();
    was_cancelled_ = stream_->connection.is_cancelled();
    const bool has_failed = was_connected_ || was_cancelled_;
    is_trusted_ = stream_->presence.is_proven() || (is_trusted_ && !has_failed);
    // What a run leaves unfinished when it ends was not lost.
    if (stream_->unroll && !shared_.closing) {
      num_dropped_ = stream_->unroll->num_unfinished_steps();
    }
    shared_.num_dropped_steps += static_cast<uint64_t>(num_dropped_);
  }
  stream_.reset();
}

void DialledStreams::act_on(const End& end) {
  if (end.kind == End::kFailed) return shared_.end(end.error);
  if (shared_.closing) return;
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
  MutexLock lock(shared_.mutex);
  shared_.num_refusing += is_final ? 1 : -1;
}

}  // namespace torchbeast
