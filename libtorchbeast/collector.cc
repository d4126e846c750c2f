#include "collector.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "end.h"
#include "shared_pages.h"
#include "thread.h"
#include "transport.h"

namespace torchbeast {

namespace {

// A session in the hands of the collector. At each time one thread works on it: who has
// claimed it.
class Running : public std::enable_shared_from_this<Running> {
 public:
  Running(EnvSession* session, Unroll* unroll, OnStep on_step)
      : session_(*session), unroll_(*unroll), on_step_(std::move(on_step)) {}

  // Sends the first action, and waits until the session has come back, with this error.
  std::exception_ptr run() {
    work([this] { step(); });
    return back_.wait(nullptr);
  }
  // In the collector's thread.
  void look() {
    if (!claim(kStepping, [this] { return session_.connection().is_ready(); })) return;
    work([this] {
      if (!session_.connection().has_message()) return come_back(nullptr);
      session_.receive(&unroll_);
      advance();
    });
  }
  // The same, every kInterruptPeriod.
  void look_for_end() {
    if (claim(kStepping, [this] { return session_.connection().needs_look(); })) {
      return come_back(nullptr);
    }
    std::exception_ptr error;
    const auto is_over = [&] {
      try {
        session_.interrupt()();
      } catch (...) {
        error = std::current_exception();
      }
      return error != nullptr;
    };
    if (claim(kStepping, is_over) || claim(kWaiting, is_over)) come_back(error);
  }

 private:
  enum Phase {
    kStepping,  // the environment has its action
    kWaiting,   // the agent has a question, or the learner has no room
    kWorking,   // a thread has claimed it
    kBack,      // it belongs to run()
  };

  // Whether the caller works on it from here on.
  template <typename F>
  bool claim(Phase from, const F& is_due) TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (phase_ != from || !is_due()) return false;
    phase_ = kWorking;
    return true;
  }
  void set(Phase next) TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    phase_ = next;
  }
  // Runs f(), which ends with the claim. What it throws comes back.
  template <typename F>
  void work(F&& f) {
    try {
      f();
    } catch (...) {
      come_back(std::current_exception());
    }
  }
  // The same, but while it asks, the claim may be another thread's.
  template <typename F>
  void wait_for(F&& ask) {
    waiting_since_ = Clock::now();
    set(kWaiting);
    try {
      ask();
    } catch (...) {
      if (claim(kWaiting, [] { return true; })) come_back(std::current_exception());
    }
  }
  void come_back(const std::exception_ptr& error) {
    set(kBack);
    back_.set(error);
  }
  void step() {
    session_.send_action(&unroll_);
    session_.connection().start_waiting();
    bool is_here;
    {
      MutexLock lock(mutex_);
      phase_ = kStepping;
      is_here = session_.connection().is_ready();
    }
    // The collector may have looked too early.
    if (is_here) bell_in(*doorbell_pages()).ring();
  }
  // Until something is to be waited for.
  void advance() {
    // Once it waits, the session may come back, and the pool end.
    const auto batcher = session_.context().inference_batcher;
    const auto queue = session_.context().learner_queue;
    const auto self = shared_from_this();
    if (std::optional<ArrayNest> question = unroll_.question()) {
      return wait_for([&] {
        batcher->ask(std::move(*question),
                     [self](const auto& answer) { self->on_answer(answer); });
      });
    }
    if (std::optional<ArrayNest> rollout = unroll_.take_rollout()) {
      return wait_for([&] {
        const bool has_room = queue->offer(
            std::move(*rollout), [self](bool is_open) { self->on_room(is_open); });
        if (has_room) on_room(true);
      });
    }
    on_step_(false);
    step();
  }
  // In the thread that answers.
  void on_answer(const DynamicBatcher::Answer& answer) {
    if (!claim(kWaiting, [] { return true; })) return;
    work([&] {
      add_wait(session_.context().inference_wait_ns);
      unroll_.answer(answer());
      advance();
    });
  }
  // In the thread that makes room.
  void on_room(bool is_open) {
    if (!claim(kWaiting, [] { return true; })) return;
    work([&] {
      if (!is_open) throw_over();
      add_wait(session_.context().queue_wait_ns);
      ++session_.context().num_rollouts;
      on_step_(true);
      step();
    });
  }
  void add_wait(std::atomic<int64_t>& sum) const {
    sum += std::chrono::nanoseconds(Clock::now() - waiting_since_).count();
  }

  // The two are gone once it is back: only who has claimed it may use them.
  EnvSession& session_;
  Unroll& unroll_;
  const OnStep on_step_;
  Awaited<std::exception_ptr> back_;
  Clock::time_point waiting_since_;
  Mutex mutex_;
  Phase phase_ TB_GUARDED_BY(mutex_) = kWorking;
};

// The one of this process, which has a thread while there are sessions. Thread-safe.
class Collector {
 public:
  // Steps the environments of a session, whose connection has a lane, until that ends.
  // Throws an error of this side, or what its `interrupt` throws; returns if
  // EnvSession::receive() says why no step comes, or there is one after all. Nobody
  // touches the session or the unroll then. Throws TransportError if the system refuses
  // a thread. REQUIRES: the newest row has its action.
  void run(EnvSession* session, Unroll* unroll, const OnStep& on_step)
      TB_EXCLUDES(mutex_) {
    const auto running = std::make_shared<Running>(session, unroll, on_step);
    add(running);
    const std::exception_ptr error = running->run();
    {
      MutexLock lock(mutex_);
      running_.erase(std::remove(running_.begin(), running_.end(), running),
                     running_.end());
      ++version_;
    }
    bell_in(*doorbell_pages()).ring();
    if (error != nullptr) std::rethrow_exception(error);
  }

 private:
  void add(const std::shared_ptr<Running>& running) TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    running_.push_back(running);
    if (!has_thread_) {
      try {
        Thread([this] { collect(); }).detach();
      } catch (const std::exception& error) {  // costs this stream, not the run
        running_.pop_back();
        throw TransportError(error.what());
      }
    }
    has_thread_ = true;
    ++version_;
    bell_in(*doorbell_pages()).ring();
  }

  void collect() TB_EXCLUDES(mutex_) {
    Bell& bell = bell_in(*doorbell_pages());
    std::vector<std::shared_ptr<Running>> list;
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

  Mutex mutex_;
  // Copied by the collector's thread if its version has changed.
  std::vector<std::shared_ptr<Running>> running_ TB_GUARDED_BY(mutex_);
  std::atomic<uint64_t> version_{0};
  bool has_thread_ TB_GUARDED_BY(mutex_) = false;
};

}  // namespace

void run_session(EnvSession& session, Unroll& unroll, const OnStep& on_step) {
  // Never destroyed: its thread may still be there while the process ends.
  static Collector* const collector = new Collector;
  session.act(&unroll);
  while (true) {
    if (session.connection().has_lane()) {
      collector->run(&session, &unroll, on_step);
    } else {
      session.send_action(&unroll);
    }
    session.receive(&unroll);
    on_step(session.act(&unroll));
  }
}

}  // namespace torchbeast
