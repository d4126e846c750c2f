#include "pool_streams.h"

#include <list>
#include <stdexcept>
#include <utility>

#include "dialled_streams.h"
#include "thread.h"

namespace torchbeast {

namespace {
// Limits are looked at every kInterruptPeriod. After a longer gap the process counts as
// suspended.
constexpr Milliseconds kLongestGap{2'000};
}  // namespace

PoolStreams::PoolStreams(ActorPoolOptions given,
                         std::shared_ptr<BatchingQueue> learner_queue,
                         std::shared_ptr<DynamicBatcher> inference_batcher,
                         ArrayNest initial_state)
    : options(std::move(given)),
      sessions{std::move(learner_queue),
               std::move(inference_batcher),
               {options.unroll_length, std::move(initial_state), options.named_rows,
                options.max_rollout_bytes}},
      hellos(options.expected),
      num_seeded_(options.addresses.size()) {
  if (const Listener* listener = options.listener.get()) {
    slots_.emplace(static_cast<size_t>(listener->max_streams()), &num_dropped_steps);
  }
  if (options.hello) hellos.check(*options.hello, "the first environment");
}

// --- What streams report

void PoolStreams::end(std::exception_ptr error) {
  {
    MutexLock lock(mutex_);
    if (is_wanted_ && first_error_ == nullptr) first_error_ = std::move(error);
    closing_ = true;
  }
  changed_.notify_all();
  has_news_.notify_all();
}

void PoolStreams::pause(Milliseconds time) {
  const auto end = Clock::now() + time;
  MutexLock lock(mutex_);
  const uint64_t number = ++num_news_;
  has_news_.notify_all();
  while (!closing_) {
    const auto now = Clock::now();
    if (now >= end && num_seen_ >= number) return;
    changed_.wait_until(mutex_, now < end ? end : now + kInterruptPeriod, nullptr);
  }
}

void PoolStreams::note(const std::string& error) {
  MutexLock lock(mutex_);
  last_error_ = error;
}

void PoolStreams::note_return(const Connection& connection) {
  ++num_reconnects_;
  events.add(Event::kReturned, connection.peer());
}

void PoolStreams::count_refusing(bool refuses) {
  MutexLock lock(mutex_);
  num_refusing_ += refuses ? 1 : -1;
}

void PoolStreams::count_failure(const std::string& text, const std::string& origin) {
  ++num_env_failures_;
  MutexLock lock(mutex_);
  ++peers_[origin].num_failures;
  last_failure_ = text;
}

std::optional<wire::Seeding> PoolStreams::next_seeding(size_t index, bool is_first) {
  if (options.listener != nullptr) return options.listener->next_seeding();
  if (!options.seed) return std::nullopt;
  const uint64_t number = is_first ? index : num_seeded_++;
  wire::Seeding seeding;
  seeding.set_seed(*options.seed);
  seeding.set_stream(options.first_stream + number * options.stream_stride);
  return seeding;
}

// --- Of run()

void PoolStreams::cancel_all() {
  MutexLock lock(mutex_);
  for (Presence* stream : streams_) {
    stream->connection().cancel("is cut off: the learner is about to end");
  }
}

void PoolStreams::keep_limits() {
  while (!closing_) {
    bool was_away, is_dialling = false;
    {
      MutexLock lock(mutex_);
      const auto now = Clock::now();
      was_away = now - std::exchange(limits_kept_at_, now) > kLongestGap;
      was_suspended_ |= was_away;
      for (Presence* stream : streams_) {
        Connection& connection = stream->connection();
        is_dialling |= connection.is_shaking_hands();
        if (was_away) connection.restart_waiting();
        connection.cancel_if_slow(options.step_timeout,
                                  "has not answered within the step timeout");
      }
    }
    if (is_dialling) bound_dialled(2 * kMaxHelloBytes);
    if (slots_) slots_->expire(options.maximum_downtime, was_away);
    MutexLock lock(mutex_);
    if (closing_) return;
    changed_.wait_until(mutex_, Clock::now() + kInterruptPeriod, nullptr);
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
  MutexLock lock(mutex_);
  num_looked_ = num_news_;
  facts.time = Clock::now();
  // After a suspension this thread may come before the one that keeps the limits.
  facts.was_suspended = std::exchange(was_suspended_, false) ||
                        facts.time - limits_kept_at_ > kLongestGap;
  facts.peers = std::exchange(peers_, {});
  for (Presence* stream : streams_) {
    stream->add_to(&facts.peers[stream->connection().origin()], facts.time);
  }
  facts.last_failure = last_failure_;
  facts.last_error = last_error_.empty() ? refusal : last_error_;
  facts.num_refusing = num_refusing_;
  return facts;
}

void PoolStreams::wait_for_news() {
  MutexLock lock(mutex_);
  num_seen_ = num_looked_;
  if (closing_ || num_news_ > num_seen_) return;
  has_news_.wait_until(mutex_, Clock::now() + kInterruptPeriod, nullptr);
}

// The caller ends it: what fails from here on is no error.
void PoolStreams::close() {
  {
    MutexLock lock(mutex_);
    is_wanted_ = false;
  }
  end();
}

void PoolStreams::run() {
  if (started_.exchange(true)) throw std::runtime_error("an ActorPool runs once");
  {
    MutexLock lock(mutex_);
    limits_kept_at_ = Clock::now();
  }
  Listener* attached = nullptr;
  std::list<DialledStreams> dialled;
  Thread limits;
  std::exception_ptr error;
  try {
    for (size_t i = 0; i < options.addresses.size(); ++i) dialled.emplace_back(this, i);
    if (options.listener != nullptr) options.listener->attach(this);
    attached = options.listener.get();
    limits = Thread([this] { keep_limits(); });
    while (!closing_) {
      const PoolFacts facts = look();
      if (options.check) options.check(facts);
      wait_for_news();
      if (sessions.learner_queue->is_closed() ||
          sessions.inference_batcher->is_closed() ||
          (dialled.empty() && attached->is_closed())) {
        end();
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  end();
  cancel_all();
  dialled.clear();
  if (attached != nullptr) attached->detach();
  if (error == nullptr) {
    MutexLock lock(mutex_);
    error = first_error_;
  }
  if (error == nullptr) return;
  // Nobody shall wait for what does not come.
  sessions.inference_batcher->close();
  sessions.learner_queue->close();
  std::rethrow_exception(error);
}

ActorPoolStats PoolStreams::stats() const {
  const UnrollContext& unrolls = sessions.unrolls;
  const auto seconds = [](auto ns) { return static_cast<double>(ns) * 1e-9; };
  ActorPoolStats stats;
  stats.num_steps = unrolls.num_steps;
  stats.num_rollouts = sessions.num_rollouts;
  stats.num_reconnects = num_reconnects_;
  stats.num_dropped_steps = num_dropped_steps;
  stats.num_refused = num_refused;
  stats.num_different = hellos.num_different();
  stats.num_env_failures = num_env_failures_;
  stats.bytes_copied = unrolls.bytes_copied;
  stats.pool_bytes =
      unrolls.rollout_pool.num_bytes() + unrolls.message_pool.num_bytes();
  stats.env_seconds = seconds(unrolls.env_ns.load());
  stats.env_wait_seconds = seconds(sessions.env_wait_ns.load());
  stats.inference_wait_seconds = seconds(sessions.inference_wait_ns.load());
  stats.queue_wait_seconds = seconds(sessions.queue_wait_ns.load());
  MutexLock lock(mutex_);
  stats.num_connected = num_connected_;
  stats.last_error = last_error_;
  return stats;
}

}  // namespace torchbeast
