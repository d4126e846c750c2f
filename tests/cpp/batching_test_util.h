// What the tests of BatchingQueue and DynamicBatcher share: options, good and faulty
// items, and threads that wait.

#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "batching.h"
#include "test_util.h"

namespace torchbeast {

using Map = ArrayNest::Map;
using Vector = ArrayNest::Vector;
using Values = std::vector<int32_t>;

// Options

inline BatchingOptions with_timeout(BatchingOptions options, int64_t milliseconds) {
  options.timeout = Milliseconds(milliseconds);
  return options;
}

inline BatchingOptions with_queue_size(BatchingOptions options, size_t size) {
  options.maximum_queue_size = size;
  return options;
}

// Items

// An item [2, width, 3] whose values start with `first`.
inline ArrayNest item(int64_t width, int32_t first = 0) {
  return numbered({2, width, 3}, first);
}

// An array that calls the queue when it is destroyed: if the lock of the queue were
// held, that would hang.
template <typename Queue>
ArrayNest asking_item(const Queue& queue, std::atomic<int>& ended) {
  const ArraySpec spec{DType::kInt32, {2, 1, 3}};
  auto memory = std::make_shared<std::vector<int32_t>>(6);
  auto* data = reinterpret_cast<uint8_t*>(memory->data());
  return Array(spec, data, std::shared_ptr<void>(data, [memory, &queue, &ended](void*) {
                 queue.size();
                 queue.stats();
                 ++ended;
               }));
}

struct Faulty {
  ArrayNest nest;
  std::vector<std::string> says;
};

inline ArrayNest good_item() {
  return Vector{Map{{"frame", numbered({2, 3, 7})}, {"reward", numbered({2, 3})}}};
}

// Items that can't be joined with a good_item(), in batches of at most 4.
inline std::vector<Faulty> faulty_items() {
  const auto with = [](ArrayNest frame, ArrayNest reward) -> ArrayNest {
    return Vector{Map{{"frame", std::move(frame)}, {"reward", std::move(reward)}}};
  };
  const Array frame = numbered({2, 1, 7});
  const Array bytes({DType::kUint8, {2, 1}}, nullptr, nullptr);
  return {
      {Vector{}, {"without any array", "a vector of 0"}},
      {Map{{"a", Vector{}}}, {"without any array"}},
      {with(frame, numbered({2})),
       {"at [0][\"reward\"]: int32 [2] has no dimension 1, the batch dimension"}},
      {Array(), {"at the root: uint8 [] has no dimension 1"}},
      {with(frame, numbered({2, 2})),
       {"at [0][\"reward\"]: int32 [2, 2] has 2 entries along dimension 1",
        "first array has 1"}},
      {with(numbered({2, 0, 7}), numbered({2, 0})),
       {"at [0][\"frame\"]: int32 [2, 0, 7] has 0 entries", "1 is needed"}},
      {with(numbered({2, 5, 7}), numbered({2, 5})),
       {"5 entries along dimension 1", "at most 4 (maximum_batch_size)"}},
      {Vector{frame},
       {"another structure", "at [0]: a dict of 2 in the first, a leaf"}},
      {with(frame, Vector{}), {"another structure", "at [0][\"reward\"]: a leaf"}},
      {with(numbered({3, 1, 7}), numbered({3, 1})),
       {"at [0][\"frame\"]: int32 [3, 1, 7] cannot be joined with the int32 [2, 3, 7]",
        "all dimensions but 1"}},
      {with(frame, bytes), {"at [0][\"reward\"]: uint8 [2, 1] cannot be joined"}},
      {with(frame, numbered({2, 1, 1})), {"at [0][\"reward\"]: int32 [2, 1, 1]"}},
  };
}

// Waiting

// Reports that a thread waits inside a call, since only then the interrupt is called.
class Waiting {
 public:
  Interrupt interrupt() {
    return [this] {
      if (!reported_.exchange(true)) promise_.set_value();
      if (stop_) throw std::domain_error("interrupted");
    };
  }
  void wait() { promise_.get_future().wait(); }
  void stop() { stop_ = true; }

 private:
  std::promise<void> promise_;
  std::atomic<bool> reported_{false};
  std::atomic<bool> stop_{false};
};

// Gives other threads the time to reach the call in which they wait. No result depends
// on it: with less time, a test meets its case less often.
inline void let_others_run() {
  const auto end = Clock::now() + std::chrono::microseconds(500);
  while (Clock::now() < end) std::this_thread::yield();
}

// A lost wake-up costs up to a second (kLookPeriod). This measures in each round what
// must happen at once, and fails if it is late in more than a tenth of the rounds; a
// busy machine may be late now and then.
class Promptness {
 public:
  ~Promptness() { EXPECT_LE(10 * num_late_, num_rounds_) << "wake-ups are lost"; }
  void start() { start_ = Clock::now(); }
  void stop() {
    ++num_rounds_;
    if (Clock::now() - start_ > kLookPeriod / 3) ++num_late_;
  }

 private:
  Clock::time_point start_;
  int num_rounds_ = 0;
  int num_late_ = 0;
};

template <typename Queue>
void wait_for_size(const Queue& queue, size_t size) {
  while (queue.size() != size) std::this_thread::yield();
}

}  // namespace torchbeast
