// What happens to peers, kept for reports.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sync.h"
#include "text.h"

namespace torchbeast {

struct Event {
  enum Kind {
    kLost,
    kReturned,
    kRefused,
    kEnvError,  // an environment has raised
  } kind;
  double time;       // seconds since 1970
  std::string text;  // names the peer
};

// Keeps the newest ones, and of refusals the first, until they are taken. Thread-safe.
class EventLog {
 public:
  void add(Event::Kind kind, const std::string& text) TB_EXCLUDES(mutex_) {
    constexpr size_t kMaxEvents = 200, kMaxRefusals = 100, kMaxText = 8192;
    const std::chrono::duration<double> now =
        std::chrono::system_clock::now().time_since_epoch();
    Event event{kind, now.count(), shortened(text, kMaxText)};
    MutexLock lock(mutex_);
    // Strangers who are refused must not push out what happens to the run's own
    // streams.
    const auto is_refusal = [](const Event& e) { return e.kind == Event::kRefused; };
    if (is_refusal(event) &&
        std::count_if(events_.begin(), events_.end(), is_refusal) >=
            static_cast<ptrdiff_t>(kMaxRefusals)) {
      ++num_forgotten_;
      return;
    }
    if (events_.size() == kMaxEvents) {
      events_.erase(events_.begin());
      ++num_forgotten_;
    }
    events_.push_back(std::move(event));
  }

  // All since the last time, and how many more there were.
  std::pair<std::vector<Event>, uint64_t> take() TB_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return {std::exchange(events_, {}), std::exchange(num_forgotten_, 0)};
  }

 private:
  Mutex mutex_;
  std::vector<Event> events_ TB_GUARDED_BY(mutex_);
  uint64_t num_forgotten_ TB_GUARDED_BY(mutex_) = 0;
};

}  // namespace torchbeast
