// The waiting items of a BatchingQueue or a DynamicBatcher, and the rules by which they
// become a batch (see batching.h).

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "array.h"
#include "batching.h"
#include "sync.h"

namespace torchbeast {

// Where a call of DynamicBatcher::compute waits. Owned by the caller and its Call
// together. Thread-safe.
class Waiter {
 public:
  enum State { kWaiting, kAnswered, kFailed, kDropped, kClosedQueue };

  // The first end counts, later ones are ignored.
  void finish(State state, ArrayNest outputs = {},
              std::shared_ptr<const std::string> message = nullptr) {
    std::function<void()> on_done;
    {
      MutexLock lock(mutex_);
      if (state_ != kWaiting) return;
      state_ = state;
      outputs_ = std::move(outputs);
      message_ = std::move(message);
      on_done.swap(on_done_);
    }
    done_.notify_one();
    if (on_done) on_done();
  }
  // Calls f() once it is finished, in the thread that does it, or at once.
  void when_done(std::function<void()> f) {
    {
      MutexLock lock(mutex_);
      if (state_ == kWaiting) return on_done_.swap(f);
    }
    f();
  }

  ArrayNest wait(const Interrupt& interrupt) {
    MutexLock lock(mutex_);
    while (state_ == kWaiting) {
      done_.wait_until(mutex_, Clock::time_point::max(), interrupt);
    }
    if (state_ == kFailed) throw AsyncError(*message_);
    if (state_ == kDropped) {
      throw AsyncError("the batch was dropped without an answer");
    }
    if (state_ == kClosedQueue) throw ClosedBatchingQueue("the queue is closed");
    return std::move(outputs_);
  }

 private:
  Mutex mutex_;
  CondVar done_;
  State state_ TB_GUARDED_BY(mutex_) = kWaiting;
  ArrayNest outputs_ TB_GUARDED_BY(mutex_);
  std::shared_ptr<const std::string> message_ TB_GUARDED_BY(mutex_);
  std::function<void()> on_done_ TB_GUARDED_BY(mutex_);
};

// The other end of a Waiter: its item's, then its batch's. If nobody answers, its
// destruction ends the wait, for which it needs no memory. Thread-safe.
class Call {
 public:
  Call() = default;  // of nobody
  explicit Call(std::shared_ptr<Waiter> waiter) : waiter_(std::move(waiter)) {}
  ~Call() { finish(Waiter::kDropped); }
  Call(Call&&) = default;
  Call& operator=(Call&& other) noexcept {
    std::swap(waiter_, other.waiter_);
    return *this;
  }

  void answer(ArrayNest outputs) const {
    finish(Waiter::kAnswered, std::move(outputs));
  }
  void fail(std::shared_ptr<const std::string> message) const {
    finish(Waiter::kFailed, {}, std::move(message));
  }
  void close() const { finish(Waiter::kClosedQueue); }
  bool is_of(const Waiter* waiter) const { return waiter_.get() == waiter; }

 private:
  void finish(Waiter::State state, ArrayNest outputs = {},
              std::shared_ptr<const std::string> message = nullptr) const {
    if (waiter_) waiter_->finish(state, std::move(outputs), std::move(message));
  }

  std::shared_ptr<Waiter> waiter_;
};

using Calls = std::vector<Call>;

struct Item {
  ArrayNest nest;
  Call call;          // of nobody in a BatchingQueue
  int64_t width = 1;  // entries along the batch dimension
  Clock::time_point arrival{};
};

// Thread-safe. What is inside its lock, and what is outside:
// - Threads are woken after unlocking, one for each thing there is to do. At most one
//   consumer is on its way at a time; it takes all that fits into its batch, and wakes
//   the next if there is more. So items that arrive close together share a batch, and
//   one item wakes one thread only.
// - A consumer that leaves without its item (an interrupt, a faulty item) wakes
//   the next.
// - Items move in and out under the lock; arrays are copied and destroyed outside.
class ItemQueue {
 public:
  explicit ItemQueue(BatchingOptions options);

  const BatchingOptions& options() const { return options_; }

  void push(ArrayNest nest, Call call, const Interrupt& interrupt) TB_EXCLUDES(mutex_);
  // Never blocks. False, and `nest` is as before, if there is no room. A call needs
  // none.
  bool try_push(ArrayNest& nest, Call call) TB_EXCLUDES(mutex_);

  // The items of the next batch; none once it is closed. A DynamicBatcher's calls go
  // into `calls`, and close() ends them until they are forgotten. If there is no memory
  // for this, the items go on waiting.
  std::vector<Item> take(const Interrupt& interrupt,
                         const std::shared_ptr<Calls>& calls = nullptr)
      TB_EXCLUDES(mutex_);
  void forget(const Calls* calls) TB_EXCLUDES(mutex_);
  // Takes back the item of a caller that leaves, if it still waits.
  void withdraw(const Waiter* waiter) TB_EXCLUDES(mutex_);

  // Joins items into a batch. std::invalid_argument if `check` is off and there is
  // something to find. Afterwards the items have no arrays any more.
  ArrayNest join(std::vector<Item>& items);
  // Entries [begin, begin + width) of all outputs.
  ArrayNest part(const ArrayNest& outputs, int64_t begin, int64_t width);

  bool close() TB_EXCLUDES(mutex_);
  bool is_closed() const TB_EXCLUDES(mutex_);
  size_t size() const TB_EXCLUDES(mutex_);
  BatchingStats stats() const;

  std::atomic<int64_t>& producer_wait() { return producer_wait_; }

 private:
  // Wakes when it ends: declared before the lock is taken, that is after unlocking.
  struct WakeUps {
    explicit WakeUps(ItemQueue& q) : queue(q) {}
    ~WakeUps() {
      if (consumer) queue.consumers_.notify_one();
      for (; producers > 0; --producers) queue.room_.notify_one();
    }
    WakeUps(const WakeUps&) = delete;

    ItemQueue& queue;
    bool consumer = false;
    size_t producers = 0;
  };

  Item make_item(ArrayNest nest, Call call) const;
  // If it throws, the item is as before.
  void add(Item& item, WakeUps& wake) TB_REQUIRES(mutex_);
  bool has_room() const TB_REQUIRES(mutex_) {
    return !options_.maximum_queue_size || items_.size() < *options_.maximum_queue_size;
  }
  // Whether a batch is complete before its deadline. That the next item would exceed
  // the maximum needs no look: then there are more entries than the maximum, so the
  // minimum.
  bool is_complete() const TB_REQUIRES(mutex_) {
    return !items_.empty() &&
           (num_entries_ >= options_.minimum_batch_size || !has_room());
  }
  Clock::time_point deadline() const TB_REQUIRES(mutex_) {
    if (items_.empty() || !options_.timeout) return Clock::time_point::max();
    return items_.front().arrival + *options_.timeout;
  }
  // Whether to wake a consumer because there is something for one to do: a batch to
  // take, or a deadline to wait for.
  bool needs_consumer() TB_REQUIRES(mutex_) {
    if (idle_consumers_ == 0 || consumer_called_) return false;
    consumer_called_ = is_complete() || (options_.timeout && !items_.empty());
    return consumer_called_;
  }

  const BatchingOptions options_;
  MemoryPool batches_;
  MemoryPool answers_;

  mutable Mutex mutex_;
  CondVar consumers_;
  CondVar room_;
  bool closed_ TB_GUARDED_BY(mutex_) = false;
  std::deque<Item> items_ TB_GUARDED_BY(mutex_);
  int64_t num_entries_ TB_GUARDED_BY(mutex_) = 0;
  size_t idle_consumers_ TB_GUARDED_BY(mutex_) = 0;
  // A consumer was woken and none has looked at the items since.
  bool consumer_called_ TB_GUARDED_BY(mutex_) = false;
  size_t blocked_producers_ TB_GUARDED_BY(mutex_) = 0;
  std::unordered_map<const Calls*, std::weak_ptr<Calls>> in_flight_
      TB_GUARDED_BY(mutex_);

  std::atomic<uint64_t> num_batches_made_{0};
  std::atomic<uint64_t> num_items_joined_{0};
  std::atomic<uint64_t> num_entries_joined_{0};
  std::atomic<uint64_t> bytes_copied_{0};
  std::atomic<int64_t> consumer_wait_{0};  // nanoseconds
  std::atomic<int64_t> producer_wait_{0};
};

// Throws std::invalid_argument, which names the place, if an answer does not fit a
// batch of this many entries.
void check_outputs(const ArrayNest& outputs, int64_t width,
                   const BatchingOptions& options);

}  // namespace torchbeast
