// Locks that Clang's thread-safety analysis understands, and limits of time.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#if defined(__clang__)
#define TB_ATTRIBUTE(x) __attribute__((x))
#else
#define TB_ATTRIBUTE(x)
#endif
#define TB_GUARDED_BY(x) TB_ATTRIBUTE(guarded_by(x))
#define TB_REQUIRES(...) TB_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define TB_EXCLUDES(...) TB_ATTRIBUTE(locks_excluded(__VA_ARGS__))

namespace torchbeast {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

inline std::string in_seconds(Milliseconds time) {  // "0.3 s"
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// The limit of a wait that never gives up: a hundred years. Clocks count nanoseconds in
// 64 bits, which are 292 years, so that a time plus or minus this is still a time.
constexpr Milliseconds kNever = std::chrono::hours(24 * 365 * 100);

// Limits become times in these functions only: a longer one counts as kNever.
inline Milliseconds clamp_limit(Milliseconds limit) {
  return std::clamp(limit, Milliseconds(0), kNever);
}
inline Clock::time_point time_after(Milliseconds limit) {
  return Clock::now() + clamp_limit(limit);
}
inline bool is_longer(Clock::duration time, Milliseconds limit) {
  return time > clamp_limit(limit);
}

// A thread that waits calls this every kInterruptPeriod, with no lock held (but see
// Collector). What it throws ends the wait. The Python bindings look for signals here,
// so that Ctrl-C works, and take Python's lock for it: a wait that ends earlier does
// not call it.
using Interrupt = std::function<void()>;
constexpr Milliseconds kInterruptPeriod{100};
// Without one, a waiting thread still wakes this often: glibc before 2.41 may lose a
// wake-up (its bug 25847).
constexpr Milliseconds kLookPeriod{1000};

// How long to wait before the next attempt to connect: 0.1 s at first, then twice as
// long each time, up to 1 s, or 10 s if the peer refuses. One thread at a time.
class Backoff {
 public:
  // `refused`: whether the peer was there and said no.
  Milliseconds next(bool refused = false) {
    wait_ = std::min(2 * wait_, Milliseconds(refused ? 10'000 : 1'000));
    return wait_;
  }
  // The peer has done its work.
  void reset() { wait_ = kFirst / 2; }

 private:
  static constexpr Milliseconds kFirst{100};
  Milliseconds wait_ = kFirst / 2;
};

// Thread-safe.
class TB_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() TB_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void unlock() TB_ATTRIBUTE(release_capability()) { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a mutex until the end of the scope. One thread at a time.
class TB_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TB_ATTRIBUTE(acquire_capability(mutex))
      : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() TB_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Calls f() at the end of the scope.
template <typename F>
class AtEnd {
 public:
  explicit AtEnd(F f) : f_(std::move(f)) {}
  ~AtEnd() { f_(); }
  AtEnd(const AtEnd&) = delete;

 private:
  const F f_;
};

// Thread-safe.
class CondVar {
 public:
  // Waits for a notification, at most until `deadline` or until `interrupt` is to be
  // called, whose exceptions come through. As with every condition variable, the caller
  // checks again what it waits for.
  void wait_until(Mutex& mutex, Clock::time_point deadline, const Interrupt& interrupt)
      TB_REQUIRES(mutex) {
    const auto turn = Clock::now() + (interrupt ? kInterruptPeriod : kLookPeriod);
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const auto status = condition_.wait_until(lock, std::min(deadline, turn));
    lock.release();
    if (status != std::cv_status::timeout || !interrupt || turn > deadline) return;
    mutex.unlock();
    try {
      interrupt();
    } catch (...) {
      mutex.lock();
      throw;
    }
    mutex.lock();
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

// A value that another thread brings. Shared with it, since who waits may leave before.
// Thread-safe.
template <typename T>
class Awaited {
 public:
  void set(T value) TB_EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      value_ = std::move(value);
    }
    changed_.notify_one();
  }
  // To be called once. Throws what `interrupt` throws.
  T wait(const Interrupt& interrupt) TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!value_) {
      changed_.wait_until(mutex_, Clock::time_point::max(), interrupt);
    }
    return std::move(*value_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::optional<T> value_ TB_GUARDED_BY(mutex_);
};

// Adds the time until the end of the scope to a sum over threads. One thread at a time.
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<int64_t>& nanoseconds) : nanoseconds_(nanoseconds) {}
  ~Stopwatch() {
    nanoseconds_ += std::chrono::nanoseconds(Clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;

 private:
  std::atomic<int64_t>& nanoseconds_;
  const Clock::time_point start_ = Clock::now();
};

}  // namespace torchbeast
