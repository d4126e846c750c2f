#include "actor_pool.h"

#include <future>
#include <list>
#include <string>
#include <utility>

#include "dialled_streams.h"
#include "pool_streams.h"
#include "thread.h"

namespace torchbeast {

namespace {
// Limits are looked at every kInterruptPeriod. After a longer gap the process counts as
// suspended.
constexpr Milliseconds kLongestGap{2'000};
}  // namespace

std::optional<wire::Seeding> PoolStreams::next_seeding(size_t index, bool is_first) {
  if (options.listener != nullptr) return options.listener->next_seeding();
  if (!options.seed) return std::nullopt;
  const uint64_t number = is_first ? index : num_seeded++;
  wire::Seeding seeding;
  seeding.set_seed(*options.seed);
  seeding.set_stream(options.first_stream + number * options.stream_stride);
  return seeding;
}

void PoolStreams::cancel_all() {
  MutexLock lock(mutex);
  for (Presence* stream : streams) {
    stream->connection().cancel("is cut off: the learner is about to end");
  }
}

void PoolStreams::keep_limits() {
  while (!closing) {
    bool was_away, is_dialling = false;
    {
      MutexLock lock(mutex);
      const auto now = Clock::now();
      was_away = now - std::exchange(limits_kept_at, now) > kLongestGap;
      was_suspended |= was_away;
      for (Presence* stream : streams) {
        Connection& connection = stream->connection();
        is_dialling |= connection.is_shaking_hands();
        if (was_away) connection.restart_waiting();
        connection.cancel_if_slow(options.step_timeout,
                                  "has not answered within the step timeout");
      }
    }
    if (is_dialling) bound_dialled(2 * kMaxHelloBytes);
    if (slots) slots->expire(options.maximum_downtime, was_away);
    MutexLock lock(mutex);
    if (closing) return;
    changed.wait_until(mutex, Clock::now() + kInterruptPeriod, nullptr);
  }
}

PoolFacts PoolStreams::look() {
  PoolFacts facts;
  facts.num_servers = options.addresses.size();
  std::string refusal;
  if (const Listener* listener = options.listener.get()) {
    facts.listener = listener->address();
    refusal = listener->stats().last_refusal;
  }
  MutexLock lock(mutex);
  num_looked = num_news;
  facts.time = Clock::now();
  // After a suspension this thread may come before the one that keeps the limits.
  facts.was_suspended =
      std::exchange(was_suspended, false) || facts.time - limits_kept_at > kLongestGap;
  facts.peers = std::exchange(peers, {});
  for (Presence* stream : streams) {
    stream->add_to(&facts.peers[stream->connection().origin()], facts.time);
  }
  facts.last_failure = last_failure;
  facts.last_error = last_error.empty() ? refusal : last_error;
  facts.num_refusing = num_refusing;
  return facts;
}

void PoolStreams::wait_for_news() {
  MutexLock lock(mutex);
  num_seen = num_looked;
  if (closing || num_news > num_seen) return;
  has_news.wait_until(mutex, Clock::now() + kInterruptPeriod, nullptr);
}

// --- The pool

ActorPool::ActorPool(ActorPoolOptions options,
                     std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     ArrayNest initial_agent_state) {
  if (options.unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be at least 1, got " +
                                std::to_string(options.unroll_length));
  }
  for (const BatchingBase* queue :
       {static_cast<BatchingBase*>(learner_queue.get()),
        static_cast<BatchingBase*>(inference_batcher.get())}) {
    if (queue->batch_dim() == 1) continue;
    throw std::invalid_argument(
        "the learner queue and the inference batcher must have batch_dim 1, because "
        "rows are [time, batch, ...]; one has " +
        std::to_string(queue->batch_dim()));
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
  shared_ =
      std::make_shared<PoolStreams>(std::move(options), std::move(learner_queue),
                                    std::move(inference_batcher), std::move(state));
}

ActorPool::~ActorPool() { close(); }

void ActorPool::run() {
  const std::shared_ptr<PoolStreams> owner = shared_;  // this may go before its end
  PoolStreams& shared = *owner;
  if (shared.started.exchange(true)) {
    throw std::runtime_error("an ActorPool runs once");
  }
  Listener* const listener = shared.options.listener.get();
  std::list<DialledStreams> dialled;
  Thread limits;
  std::exception_ptr error;
  bool attached = false;
  try {
    for (size_t i = 0; i < shared.options.addresses.size(); ++i) {
      dialled.emplace_back(&shared, i).attend();
    }
    if (listener != nullptr) {
      listener->attach(&shared);
      attached = true;
    }
    {
      MutexLock lock(shared.mutex);
      shared.limits_kept_at = Clock::now();
    }
    limits = Thread([&shared] { shared.keep_limits(); });
    while (!shared.closing) {
      const PoolFacts facts = shared.look();
      if (shared.options.check) shared.options.check(facts);
      for (DialledStreams& streams : dialled) streams.attend();
      shared.wait_for_news();
      if (shared.sessions.learner_queue->is_closed() ||
          shared.sessions.inference_batcher->is_closed() ||
          (dialled.empty() && listener->is_closed())) {
        shared.end();
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  shared.end();
  shared.cancel_all();
  dialled.clear();
  if (attached) listener->detach();
  {
    MutexLock lock(shared.mutex);  // what the last streams met
    if (error == nullptr) error = shared.first_error;
  }
  if (error == nullptr) return;
  // Nobody shall wait for what does not come.
  shared.sessions.inference_batcher->close();
  shared.sessions.learner_queue->close();
  std::rethrow_exception(error);
}

void ActorPool::close() { shared_->close(); }

void ActorPool::settle() { shared_->hellos.settle(); }

EventLog& ActorPool::events() { return shared_->events; }

uint64_t ActorPool::count() const { return shared_->sessions.unrolls.num_steps; }

ActorPoolStats ActorPool::stats() const {
  PoolStreams& shared = *shared_;
  const SessionContext& sessions = shared.sessions;
  const UnrollContext& unrolls = sessions.unrolls;
  const auto seconds = [](auto ns) { return static_cast<double>(ns) * 1e-9; };
  ActorPoolStats stats;
  stats.num_steps = unrolls.num_steps;
  stats.num_rollouts = sessions.num_rollouts;
  stats.num_reconnects = shared.num_reconnects;
  stats.num_dropped_steps = shared.num_dropped_steps;
  stats.num_different = shared.hellos.num_different();
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
  std::packaged_task<wire::EnvHello()> ask([&] {
    connection.open();  // which may take long
    wire::EnvHello hello;
    try {
      hello = connection.shake_hands(std::nullopt);
    } catch (const WireError& error) {
      throw WireError(connection.peer() + " breaks the rules: " + error.what());
    }
    // The environment that was made to answer is gone afterwards.
    static_cast<void>(end_of([&] { connection.leave(); }));
    expected.check(hello, connection.peer());
    return hello;
  });
  std::future<wire::EnvHello> hello = ask.get_future();
  const Thread asking(std::move(ask));
  try {
    const auto deadline = time_after(timeout);
    while (hello.wait_for(kInterruptPeriod) != std::future_status::ready) {
      if (interrupt) interrupt();
      bound_dialled(2 * kMaxHelloBytes);
      if (Clock::now() >= deadline) connection.cancel("has not answered in time");
    }
  } catch (...) {
    connection.cancel("is no longer wanted");
    throw;
  }
  return hello.get();
}

}  // namespace torchbeast
