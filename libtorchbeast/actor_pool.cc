#include "actor_pool.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <future>
#include <new>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "connection.h"
#include "env_session.h"
#include "places.h"
#include "stream_server.h"
#include "unroll.h"

namespace torchbeast {

namespace {

constexpr Milliseconds kFirstBackoff{50};  // doubled before each wait
constexpr Milliseconds kLongestBackoff{1'000};
constexpr Milliseconds kLongestBackoffAfterRefusal{10'000};
// A server that is not there yet is no event before so long.
constexpr Milliseconds kQuietStart{5'000};
constexpr Milliseconds kMinute{60'000};
constexpr char kStuck[] = "has not answered within the step timeout";
constexpr char kUnwanted[] = "is no longer wanted";

// Ends a stream's thread in peace.
struct Stopped {};

}  // namespace

// --- What the streams' threads share
// --------------------------------------------------

struct ActorPool::Shared {
  class Presence;

  Shared(ActorPoolOptions options, std::shared_ptr<BatchingQueue> learner_queue,
         std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_state)
      : options(std::move(options)),
        sessions(std::move(learner_queue), std::move(inference_batcher),
                 this->options.unroll_length, std::move(initial_state),
                 this->options.named_rows, this->options.max_rollout_bytes),
        hellos(this->options.expected),
        num_seeded(this->options.addresses.size()) {
    const Listener* listener = this->options.listener.get();
    if (listener != nullptr) {
      places.emplace(static_cast<size_t>(listener->max_streams()), &num_dropped_steps);
    }
    if (this->options.hello) {
      const auto& addresses = this->options.addresses;
      hellos.check(*this->options.hello,
                   addresses.empty() ? "the first environment"
                                     : "the environment server at " + addresses[0]);
    }
  }

  void close() TB_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      closing = true;
    }
    changed.notify_all();
  }

  void fail(std::exception_ptr error) TB_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      if (!closing && first_error == nullptr) first_error = std::move(error);
      closing = true;
    }
    changed.notify_all();
  }

  // Sleeps, but not beyond close().
  void sleep(Milliseconds time) TB_EXCLUDES(mutex) {
    const auto end = Clock::now() + time;
    MutexLock lock(mutex);
    while (!closing && Clock::now() < end) changed.wait_until(mutex, end, nullptr);
  }

  void note(const std::string& error) TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    last_error = error;
  }

  // From run()'s thread.
  void cancel_all() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    for (Connection* connection : connections) connection->cancel(kUnwanted);
  }
  void cancel_stuck() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    for (Connection* connection : connections) {
      connection->cancel_if_slow(options.step_timeout, kStuck);
    }
  }
  void check_downtime() TB_EXCLUDES(mutex);
  // REQUIRES: `error` is being handled.
  void count_failure(const EnvironmentError& error) TB_EXCLUDES(mutex);

  // Of the next stream of the server at address `index`.
  std::optional<wire::Seeding> next_seeding(size_t index, bool is_first);

  // An environment that has joined, in its stream's thread.
  grpc::Status serve(Connection& connection, const wire::EnvHello& hello);
  void unroll_joined(Connection& connection, const wire::EnvHello& hello);

  const ActorPoolOptions options;
  SessionContext sessions;
  HelloCheck hellos;
  std::optional<Places> places;  // with a listener

  std::atomic<bool> closing{false};  // written under the mutex, for sleepers
  std::atomic<bool> started{false};
  Mutex mutex;
  CondVar changed;
  std::exception_ptr first_error TB_GUARDED_BY(mutex);
  std::string last_error TB_GUARDED_BY(mutex);
  std::set<Connection*> connections TB_GUARDED_BY(mutex);
  uint64_t num_connected TB_GUARDED_BY(mutex) = 0;  // those that have sent a step
  uint64_t num_present TB_GUARDED_BY(mutex) = 0;    // see Presence
  uint64_t num_final TB_GUARDED_BY(mutex) = 0;      // servers that refuse for good
  Clock::time_point down_since TB_GUARDED_BY(mutex) = Clock::now();
  std::deque<Clock::time_point> failures TB_GUARDED_BY(mutex);  // of the last minute
  EventLog events;

  std::atomic<uint64_t> num_seeded;  // streams
  std::atomic<uint64_t> num_reconnects{0};
  std::atomic<uint64_t> num_dropped_steps{0};
  std::atomic<uint64_t> num_refused{0};
  std::atomic<uint64_t> num_env_failures{0};
};

// One connection of a stream. While it lives, run() can cancel the connection. While
// one is present, the run does not end for lack of environments: one that has made a
// step, or that has the benefit of the doubt.
class ActorPool::Shared::Presence {
 public:
  // Throws Stopped once the pool ends.
  Presence(Shared* shared, Connection* connection, bool has_benefit)
      : shared_(*shared), connection_(connection) {
    MutexLock lock(shared_.mutex);
    if (shared_.closing) throw Stopped();
    shared_.connections.insert(connection_);
    if (has_benefit) come();
  }
  ~Presence() {
    MutexLock lock(shared_.mutex);
    shared_.connections.erase(connection_);
    if (is_connected_) --shared_.num_connected;
    if (is_present_) --shared_.num_present;
    if (is_proven_) shared_.down_since = Clock::now();
  }
  Presence(const Presence&) = delete;

  // Its first row is there.
  void connect() {
    MutexLock lock(shared_.mutex);
    ++shared_.num_connected;
    is_connected_ = true;
  }
  // It has made a step.
  void prove() {
    if (is_proven_) return;
    MutexLock lock(shared_.mutex);
    if (!is_present_) come();
    is_proven_ = true;
  }
  bool is_proven() const { return is_proven_; }

 private:
  void come() TB_REQUIRES(shared_.mutex) {
    ++shared_.num_present;
    is_present_ = true;
  }

  Shared& shared_;
  Connection* const connection_;
  bool is_connected_ = false;
  bool is_present_ = false;
  bool is_proven_ = false;
};

// --- An environment server, dialled
// ---------------------------------------------------

class ActorPool::Actor {
 public:
  // Of the address with this index.
  Actor(Shared* shared, size_t index)
      : shared_(*shared), index_(index), address_(shared->options.addresses[index]) {}

  // The thread.
  void run() {
    try {
      while (true) {
        try_stream();
        shared_.check_downtime();
        shared_.sleep(backoff_);
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
      shared_.count_failure(error);
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

  // `is_final`: the server refuses this learner; rethrown if all do.
  void after(Event::Kind kind, std::string text, bool is_final) {
    if (shared_.closing) throw Stopped();
    // Dialling in vain again and again is one event.
    const bool is_news = was_connected_ || (text != last_text_ &&
                                            (kind != Event::kLost || was_cancelled_ ||
                                             Clock::now() - began_ > kQuietStart));
    if (is_news) last_text_ = text;
    shared_.note(text);
    if (kind == Event::kRefused) ++shared_.num_refused;
    if (num_dropped_ > 0) {
      text += "\n" + std::to_string(num_dropped_) + " steps are dropped";
    }
    if (is_news) shared_.events.add(kind, std::move(text));
    set_final(is_final);
    backoff_ =
        std::min(2 * backoff_, kind == Event::kRefused ? kLongestBackoffAfterRefusal
                                                       : kLongestBackoff);
  }

  // REQUIRES: an error is being handled, if `is_final`.
  void set_final(bool is_final) {
    if (is_final_ == is_final) return;
    is_final_ = is_final;
    bool all;
    {
      MutexLock lock(shared_.mutex);
      shared_.num_final += is_final ? 1 : -1;
      all = shared_.num_final == shared_.options.addresses.size();
    }
    if (is_final && all && shared_.options.listener == nullptr) throw;
  }

  // From dialling until the stream is lost.
  void run_stream() {
    DialledConnection connection(address_, shared_.options.security, kStreamMethod,
                                 "the environment server");
    Shared::Presence presence(&shared_, &connection, has_benefit_);
    std::optional<Unroll> unroll;
    try {
      connection.open();
      if (!seeding_) seeding_ = shared_.next_seeding(index_, !answered_before_);
      const wire::EnvHello hello = connection.shake_hands(seeding_);
      seeding_.reset();  // used
      answered_before_ = true;
      shared_.hellos.check(hello, connection.peer());
      EnvSession session(&shared_.sessions, &connection, hello, [this] {
        if (shared_.closing) throw Stopped();
      });
      const EnvRow first = session.read_row();
      presence.connect();
      was_connected_ = true;
      set_final(false);
      if (connected_before_) {
        ++shared_.num_reconnects;
        shared_.events.add(Event::kReturned, connection.peer());
      }
      connected_before_ = true;
      unroll.emplace(&shared_.sessions.unrolls, session.spec(), first,
                     hello.first_step());
      session.act(&*unroll);
      while (true) {
        const bool finished = session.step(&*unroll);
        presence.prove();
        if (finished) backoff_ = kFirstBackoff;
      }
    } catch (const ClosedBatchingQueue&) {
      throw;
    } catch (...) {
      // One that hangs, or never makes a step, gets no benefit of the doubt again.
      was_cancelled_ = connection.is_cancelled();
      const bool was_in_vain = was_connected_ || was_cancelled_;
      has_benefit_ = presence.is_proven() || (has_benefit_ && !was_in_vain);
      // What a run leaves unfinished when it ends was not lost.
      if (unroll && !shared_.closing) num_dropped_ = unroll->num_unfinished_steps();
      shared_.num_dropped_steps += static_cast<uint64_t>(num_dropped_);
      throw;
    }
  }

  Shared& shared_;
  const size_t index_;
  const Address address_;

  // Of this thread alone.
  std::optional<wire::Seeding> seeding_;  // of the next stream
  bool answered_before_ = false;
  const Clock::time_point began_ = Clock::now();
  bool connected_before_ = false;
  bool has_benefit_ = true;
  bool is_final_ = false;
  std::string last_text_;
  Milliseconds backoff_ = kFirstBackoff;
  // Of the last connection.
  bool was_connected_ = false;
  bool was_cancelled_ = false;  // because it hung
  int64_t num_dropped_ = 0;
};

// --- An environment that has joined
// ---------------------------------------------------

grpc::Status ActorPool::Shared::serve(Connection& connection,
                                      const wire::EnvHello& hello) {
  const grpc::Status over(grpc::StatusCode::UNAVAILABLE,
                          "this learner is about to end");
  try {
    unroll_joined(connection, hello);
    return grpc::Status::OK;  // it has left
  } catch (const Refusal&) {
    throw;
  } catch (const WireError& error) {  // the listener notes the event
    note(error.what());
    throw;
  } catch (const TooManyBytes& error) {
    throw Refusal{{grpc::StatusCode::RESOURCE_EXHAUSTED,
                   std::string("this learner has no memory for it: ") + error.what()}};
  } catch (const std::bad_alloc&) {
    throw Refusal{{grpc::StatusCode::RESOURCE_EXHAUSTED,
                   "this learner has no memory for a rollout of it"}};
  } catch (const TransportError& error) {
    if (!closing) {
      note(error.what());
      events.add(Event::kLost, error.what());
    }
    return {grpc::StatusCode::UNAVAILABLE, error.what()};
  } catch (const Stopped&) {
    return over;
  } catch (const ClosedBatchingQueue&) {
    close();
    return over;
  } catch (const EnvironmentError& error) {
    if (!closing) {
      note(error.what());
      events.add(Event::kEnvError, error.what());
      count_failure(error);
    }
    return grpc::Status::OK;  // it knows, and all was read
  } catch (...) {
    fail(std::current_exception());
    return {grpc::StatusCode::ABORTED, "the run has failed"};
  }
}

// Until the environment leaves.
void ActorPool::Shared::unroll_joined(Connection& connection,
                                      const wire::EnvHello& hello) {
  Presence presence(this, &connection, false);
  try {
    hellos.check(hello, connection.peer());
  } catch (const TransportError& error) {
    throw Refusal{{grpc::StatusCode::FAILED_PRECONDITION, error.what()}};
  }
  const Interrupt interrupt = [this] {
    if (closing || options.listener->is_closed()) throw Stopped();
  };
  EnvSession session(&sessions, &connection, hello, interrupt);
  const uint64_t number = hello.first_step();
  EnvRow newest;
  try {
    newest = session.read_row();
  } catch (const Connection::Left&) {
    return;
  }
  Places::Seat seat(&*places, &connection, hello.stream_id(),
                    is_between_episodes(session.spec(), newest), interrupt);
  presence.connect();
  presence.prove();
  std::unique_ptr<Unroll>& unroll = seat.unroll();
  try {
    switch (seat.arrival()) {
      case Places::Arrival::kBegins:
        unroll =
            std::make_unique<Unroll>(&sessions.unrolls, session.spec(), newest, number);
        break;
      case Places::Arrival::kTakesOver:
        unroll->hand_over(newest, number);
        break;
      case Places::Arrival::kGoesOn:
        ++num_reconnects;
        events.add(Event::kReturned, connection.peer());
        if (number == unroll->newest_number() + 1) {
          unroll->take(newest);
        } else if (number != unroll->newest_number()) {
          throw WireError("hello.first_step is " + std::to_string(number) +
                          ", and this stream_id was at step " +
                          std::to_string(unroll->newest_number()));
        }
        break;
    }
    session.act(unroll.get());
    while (true) session.step(unroll.get());
  } catch (const Connection::Left&) {
    seat.departure = Places::Departure::kLeft;
  } catch (const TransportError&) {
    seat.departure = Places::Departure::kLost;
    throw;
  } catch (const WireError&) {
    seat.departure = Places::Departure::kLost;
    throw;
  } catch (const EnvironmentError&) {
    seat.departure = Places::Departure::kFailed;
    throw;
  }
}

std::optional<wire::Seeding> ActorPool::Shared::next_seeding(size_t index,
                                                             bool is_first) {
  if (options.listener != nullptr) return options.listener->next_seeding();
  if (!options.seed) return std::nullopt;
  const uint64_t number = is_first ? index : num_seeded++;
  wire::Seeding seeding;
  seeding.set_seed(*options.seed);
  seeding.set_stream(options.first_stream + number * options.stream_stride);
  return seeding;
}

void ActorPool::Shared::count_failure(const EnvironmentError& error) {
  ++num_env_failures;
  bool too_many;
  {
    MutexLock lock(mutex);
    const auto now = Clock::now();
    failures.push_back(now);
    while (now - failures.front() > kMinute) failures.pop_front();
    too_many = failures.size() > static_cast<size_t>(options.max_env_failures);
  }
  if (!too_many) return;
  if (options.max_env_failures == 0) return fail(std::current_exception());
  fail(std::make_exception_ptr(EnvironmentError(
      "more than " + std::to_string(options.max_env_failures) +
      " environments have raised within a minute. The last: " + error.what())));
}

// Some environment must be there.
void ActorPool::Shared::check_downtime() {
  const Listener* listener = options.listener.get();
  if (places) places->expire(options.maximum_downtime);
  std::string why;
  {
    MutexLock lock(mutex);
    if (num_present > 0) return;
    if (!is_longer(Clock::now() - down_since, options.maximum_downtime)) return;
    why = last_error;
  }
  if (listener != nullptr && why.empty()) why = listener->stats().last_refusal;
  // Servers are dialled at least once.
  if (listener == nullptr && why.empty()) return;
  const std::string time = in_seconds(options.maximum_downtime);
  const std::string text = listener == nullptr
                               ? "no connection for " + time + ": " + why
                               : "no environment has joined at " + listener->address() +
                                     " for " + time +
                                     (why.empty() ? "" : "; the last error: " + why);
  fail(std::make_exception_ptr(TransportError(text, false)));
}

// --- The pool
// -------------------------------------------------------------------------

ActorPool::ActorPool(ActorPoolOptions options,
                     std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     ArrayNest initial_agent_state) {
  if (options.unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be at least 1, got " +
                                std::to_string(options.unroll_length));
  }
  if (options.addresses.empty() && options.listener == nullptr) {
    throw std::invalid_argument(
        "env_server_addresses is empty, and there is no listener");
  }
  for (const std::string& address : options.addresses) {
    client_credentials(Address(address), options.security);  // checks both
  }
  if (options.step_timeout.count() <= 0 || options.maximum_downtime.count() < 0) {
    throw std::invalid_argument(
        "the step timeout must be above 0 and the maximum downtime not negative");
  }
  if (options.max_env_failures < 0) {
    throw std::invalid_argument("max_env_failures must be at least 0, got " +
                                std::to_string(options.max_env_failures));
  }
  if (options.max_rollout_bytes == 0) options.max_rollout_bytes = half_of_memory();
  if (options.hello) {
    const size_t num_joined =
        options.listener ? static_cast<size_t>(options.listener->max_streams()) : 0;
    try {
      check_rollout_bytes(StreamSpec(*options.hello), options.unroll_length,
                          options.addresses.size() + num_joined,
                          options.max_rollout_bytes);
    } catch (const TooManyBytes& error) {
      throw std::invalid_argument(error.what());
    }
  }
  MemoryPool pool;  // what comes in may be Python's; actors want memory of their own
  ArrayNest state = initial_agent_state.map([&pool](const Array& array) {
    if (array.shape().size() < 2) {
      throw std::invalid_argument(
          "the initial agent state's arrays must be [layers, n, ...], and one is " +
          array.shape().to_string());
    }
    Array copied = pool.allocate(array.spec());
    copy(array, copied);
    return copied;
  });
  shared_ = std::make_shared<Shared>(std::move(options), std::move(learner_queue),
                                     std::move(inference_batcher), std::move(state));
}

ActorPool::~ActorPool() { close(); }

void ActorPool::run(const Interrupt& interrupt) {
  Shared& shared = *shared_;
  if (shared.started.exchange(true)) {
    throw std::runtime_error("an ActorPool runs once");
  }
  Listener* const listener = shared.options.listener.get();
  std::vector<std::unique_ptr<Actor>> actors;
  std::vector<std::thread> threads;
  std::exception_ptr error;
  bool attached = false;
  try {
    {
      MutexLock lock(shared.mutex);
      shared.down_since = Clock::now();
    }
    for (size_t i = 0; i < shared.options.addresses.size(); ++i) {
      actors.push_back(std::make_unique<Actor>(&shared, i));
      threads.emplace_back([actor = actors.back().get()] { actor->run(); });
    }
    if (listener != nullptr) {
      listener->attach(
          [&shared](Connection& connection, const wire::EnvHello& hello) {
            return shared.serve(connection, hello);
          },
          [&shared](const EnvironmentError& error) { shared.count_failure(error); });
      attached = true;
    }
    while (!shared.closing) {
      {
        MutexLock lock(shared.mutex);
        if (!shared.closing) {
          shared.changed.wait_until(shared.mutex, Clock::now() + kInterruptPeriod,
                                    nullptr);
        }
      }
      shared.cancel_stuck();
      shared.check_downtime();
      if (interrupt) interrupt();
      if (shared.sessions.learner_queue->is_closed() ||
          shared.sessions.inference_batcher->is_closed()) {
        shared.close();
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  shared.close();
  shared.cancel_all();
  for (std::thread& thread : threads) thread.join();
  if (attached) listener->detach();
  {
    MutexLock lock(shared.mutex);
    if (error == nullptr) error = shared.first_error;
  }
  if (error != nullptr) std::rethrow_exception(error);
}

void ActorPool::close() { shared_->close(); }

EventLog& ActorPool::events() { return shared_->events; }

uint64_t ActorPool::count() const { return shared_->sessions.unrolls.num_steps; }

ActorPoolStats ActorPool::stats() const {
  Shared& shared = *shared_;
  const SessionContext& sessions = shared.sessions;
  const UnrollContext& unrolls = sessions.unrolls;
  const auto seconds = [](auto ns) { return static_cast<double>(ns) * 1e-9; };
  ActorPoolStats stats;
  stats.num_steps = unrolls.num_steps;
  stats.num_rollouts = sessions.num_rollouts;
  stats.num_reconnects = shared.num_reconnects;
  stats.num_dropped_steps = shared.num_dropped_steps;
  stats.bytes_received = sessions.bytes_received;
  stats.bytes_copied = unrolls.bytes_copied;
  stats.pool_bytes =
      unrolls.rollout_pool.num_bytes() + unrolls.message_pool.num_bytes();
  stats.env_seconds = seconds(unrolls.env_ns.load());
  stats.env_wait_seconds = seconds(sessions.env_wait_ns.load());
  stats.inference_wait_seconds = seconds(sessions.inference_wait_ns.load());
  stats.queue_wait_seconds = seconds(sessions.queue_wait_ns.load());
  MutexLock lock(shared.mutex);
  stats.num_connected = shared.num_connected;
  stats.num_refused = shared.num_refused;
  stats.num_env_failures = shared.num_env_failures;
  stats.last_error = shared.last_error;
  return stats;
}

wire::EnvHello ActorPool::probe(const std::string& address, const Security& security,
                                Milliseconds timeout,
                                const ExpectedEnvironment& expected,
                                const Interrupt& interrupt) {
  DialledConnection connection(Address(address), security, kStreamMethod,
                               "the environment server");
  std::future<wire::EnvHello> hello = std::async(std::launch::async, [&] {
    connection.open();  // which may take long
    wire::EnvHello hello;
    try {
      hello = connection.shake_hands(std::nullopt);
      StreamSpec{hello};  // refuses what breaks the rules
    } catch (const WireError& error) {
      throw WireError(connection.peer() + " breaks the rules: " + error.what());
    }
    try {
      // The environment that was made to answer is gone afterwards.
      connection.leave();
    } catch (const TransportError&) {
    }
    expected.check(hello, connection.peer());
    return hello;
  });
  try {
    const auto deadline = time_after(timeout);
    while (hello.wait_for(
               std::min<Clock::duration>(kInterruptPeriod, deadline - Clock::now())) !=
           std::future_status::ready) {
      if (interrupt) interrupt();
      if (Clock::now() >= deadline) connection.cancel("has not answered in time");
    }
  } catch (...) {
    connection.cancel("is no longer wanted");
    hello.wait();
    throw;
  }
  return hello.get();
}

}  // namespace torchbeast
