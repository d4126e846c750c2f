#include "collector.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "shared_pages.h"
#include "thread.h"

namespace torchbeast {

// A session in the hands of the collector. At each time one thread works on it.
struct Collector::Running : std::enable_shared_from_this<Running> {
  enum Phase {
    kStepping,  // the environment has its action
    kAsking,    // the agent has the question
    kWorking,   // a thread has taken it
    kBack,      // the stream's thread may have it: see `rollout` and `error`
  };

  Running(EnvSession* session, Unroll* unroll, const OnStep& on_step)
      : session(*session), unroll(*unroll), on_step(on_step) {}

  // Whether the caller works on it from here on.
  template <typename F>
  bool claim(Phase from, const F& is_due) TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    if (abandoned || phase != from || !is_due()) return false;
    phase = kWorking;
    return true;
  }
  void set(Phase next) TB_EXCLUDES(mutex) {
    {
      MutexLock lock(mutex);
      phase = next;
    }
    if (next == kBack) changed.notify_one();
  }
  void step() TB_EXCLUDES(mutex) {
    session.send_action(&unroll);
    session.connection().start_waiting();
    bool is_here;
    {
      MutexLock lock(mutex);
      phase = kStepping;
      is_here = session.connection().is_ready();
    }
    // The collector may have looked too early.
    if (is_here) bell_in(*doorbell_pages()).ring();
  }
  // Runs f(), which ends with set(). What it throws is for the stream's thread.
  template <typename F>
  void work(F&& f) {
    try {
      f();
    } catch (...) {
      error = std::current_exception();
      set(kBack);
    }
  }

  // In the collector's thread.
  void look() {
    if (!claim(kStepping, [this] { return session.connection().is_ready(); })) return;
    work([this] {
      if (!session.connection().has_message()) {
        return set(kBack);  // the stream says why
      }
      session.receive(&unroll);
      go_on();
    });
  }
  void look_for_end() {
    if (claim(kStepping, [this] { return session.connection().needs_look(); })) {
      set(kBack);
    }
  }
  // In the thread that answers.
  void on_answer(const DynamicBatcher::Answer& answer) {
    if (!claim(kAsking, [] { return true; })) return;
    work([&] {
      SessionContext& context = session.context();
      context.inference_wait_ns +=
          std::chrono::nanoseconds(Clock::now() - asked_at).count();
      unroll.answer(answer());
      go_on();
    });
  }
  // Until something is to be waited for.
  void go_on() {
    SessionContext& context = session.context();
    if (std::optional<ArrayNest> question = unroll.question()) {
      asked_at = Clock::now();
      // Once it is asking, the session may end, and the pool with it.
      const std::shared_ptr<DynamicBatcher> batcher = context.inference_batcher;
      set(kAsking);
      batcher->ask(
          std::move(*question),
          [self = shared_from_this()](const auto& answer) { self->on_answer(answer); });
      return;
    }
    std::optional<ArrayNest> finished = unroll.take_rollout();
    if (finished && !context.learner_queue->try_enqueue(*finished)) {
      rollout = std::move(finished);
      return set(kBack);
    }
    if (finished) ++context.num_rollouts;
    on_step(finished.has_value());
    step();
  }

  // These three are gone once it is abandoned: only who has claimed it may use them.
  EnvSession& session;
  Unroll& unroll;
  const OnStep& on_step;
  Clock::time_point asked_at;
  // What has brought it back: a rollout for which there was no room, an error, or
  // neither: then no step comes.
  std::optional<ArrayNest> rollout;
  std::exception_ptr error;
  Mutex mutex;
  CondVar changed;
  Phase phase TB_GUARDED_BY(mutex) = kWorking;
  bool abandoned TB_GUARDED_BY(mutex) = false;  // nobody may work on it any more
};

Collector& Collector::instance() {
  // Never destroyed: its thread may still be there while the process ends.
  static Collector* const collector = new Collector;
  return *collector;
}

void Collector::run(EnvSession* session, Unroll* unroll, const OnStep& on_step) {
  const auto running = std::make_shared<Running>(session, unroll, on_step);
  bool is_ours = true;  // this thread works on it
  add(running);
  // Before the session and the unroll are gone, also if `interrupt` throws.
  const AtEnd removal([&] {
    remove(running);
    MutexLock lock(running->mutex);
    running->abandoned = true;
    while (!is_ours && running->phase == Running::kWorking) {
      running->changed.wait_until(running->mutex, Clock::now() + kInterruptPeriod,
                                  nullptr);
    }
  });
  running->step();
  while (true) {
    is_ours = false;
    {
      MutexLock lock(running->mutex);
      while (running->phase != Running::kBack) {
        running->changed.wait_until(running->mutex, Clock::time_point::max(),
                                    session->interrupt());
      }
      running->phase = Running::kWorking;
    }
    is_ours = true;
    if (running->error != nullptr) std::rethrow_exception(running->error);
    if (running->rollout) {
      session->deliver(std::move(*std::exchange(running->rollout, std::nullopt)));
      on_step(true);
      running->step();
    } else {
      session->receive(unroll);  // throws why, or there is a step after all
      running->go_on();
    }
  }
}

void Collector::add(const std::shared_ptr<Running>& running) {
  MutexLock lock(mutex_);
  if (!has_thread_) Thread([this] { collect(); }).detach();
  has_thread_ = true;
  running_.push_back(running);
  ++version_;
  bell_in(*doorbell_pages()).ring();
}

void Collector::remove(const std::shared_ptr<Running>& running) {
  MutexLock lock(mutex_);
  running_.erase(std::find(running_.begin(), running_.end(), running));
  ++version_;
  bell_in(*doorbell_pages()).ring();
}

void Collector::collect() {
  Bell& bell = bell_in(*doorbell_pages());
  RunningList list;
  uint64_t version = 0;
  auto look_at = Clock::now() + kInterruptPeriod;
  while (true) {
    const uint32_t count = bell.count();
    if (version != version_) {
      MutexLock lock(mutex_);
      list = running_;
      version = version_;
      has_thread_ = !list.empty();
      if (!has_thread_) return;
    }
    for (const auto& running : list) running->look();
    if (Clock::now() >= look_at) {
      for (const auto& running : list) running->look_for_end();
      look_at = Clock::now() + kInterruptPeriod;
    }
    bell.wait(count, kInterruptPeriod);
  }
}

}  // namespace torchbeast
