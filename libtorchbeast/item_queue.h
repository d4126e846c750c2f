// The waiting items of a BatchingQueue or a DynamicBatcher, and the rules by which they
// become a batch (see batching.h).

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <utility>
#include <vector>

#include "array.h"
#include "batching.h"
#include "sync.h"

namespace torchbeast {

using Answer = DynamicBatcher::Answer;
using OnDone = std::function<void(Answer&)>;
using OnRoom = BatchingQueue::OnRoom;

// A caller of DynamicBatcher. It belongs to its item, then to the batch, then to who
// answers. The first end counts; if there is none, its destruction is one, for which it
// needs no memory. One thread at a time.
class Call {
 public:
  explicit Call(OnDone on_done = nullptr) : on_done_(std::move(on_done)) {}
  ~Call() { finish(throw_dropped); }
  Call(Call&& other) noexcept { on_done_.swap(other.on_done_); }
  Call& operator=(Call&& other) noexcept {
    on_done_.swap(other.on_done_);
    return *this;
  }
  void finish(Answer answer) {
    if (on_done_) std::exchange(on_done_, nullptr)(answer);
  }

 private:
  [[noreturn]] static ArrayNest throw_dropped() {
    throw AsyncError("the batch was dropped without an answer");
  }

  OnDone on_done_;
};

using Calls = std::vector<Call>;

struct Item {
  ArrayNest nest;
  int64_t width = 1;  // entries along the batch dimension
  uint64_t number = 0;
  Clock::time_point arrival{};
  Call call{};                  // of nobody in a BatchingQueue
  std::list<OnRoom> on_room{};  // one while the item is beyond the maximum
};

// Thread-safe. Nobody waits for room in it: an item that comes while it is full is
// taken in, and stands in the line, until who brought it is told that there is room.
//
// What is inside its lock, and what is outside:
// - Threads are woken, and producers told, after unlocking. At most one consumer is on
//   its way at a time; it takes all that fits into its batch, and wakes the next if
//   there is more. So items that arrive close together share a batch, and one item
//   wakes one thread only.
// - A consumer that leaves without its item (an interrupt) wakes the next.
// - Items move in and out under the lock; arrays are copied and destroyed outside.
class ItemQueue {
 public:
  explicit ItemQueue(BatchingOptions options);

  const BatchingOptions& options() const { return options_; }

  // Adds an item. on_done is called once unless this throws; on_room unless there is
  // room at once. Either may be null. Throws as BatchingQueue::offer().
  struct Pushed {
    uint64_t number;  // of the item
    bool has_room;
  };
  Pushed push(ArrayNest nest, OnDone on_done, OnRoom on_room) TB_EXCLUDES(mutex_);

  // The items of the next batch; none once it is closed. A DynamicBatcher's calls stay
  // in flight, for claim(*in_flight). If there is no memory for this, the items go on
  // waiting.
  std::vector<Item> take(const Interrupt& interrupt, uint64_t* in_flight = nullptr)
      TB_EXCLUDES(mutex_);
  // The calls of a batch; none if they were claimed before, or the queue was closed.
  Calls claim(uint64_t batch) TB_EXCLUDES(mutex_);
  // Takes back the item of a caller that leaves, if it still waits.
  void withdraw(uint64_t number) TB_EXCLUDES(mutex_);

  // Joins items into a batch. Afterwards the items have no arrays any more.
  ArrayNest join(std::vector<Item>& items);
  // Entries [begin, begin + width) of all outputs.
  ArrayNest part(const ArrayNest& outputs, int64_t begin, int64_t width);

  bool close() TB_EXCLUDES(mutex_);
  bool is_closed() const TB_EXCLUDES(mutex_);
  size_t size() const TB_EXCLUDES(mutex_);
  int64_t maximum_batch_size() const { return options_.maximum_batch_size; }
  BatchingStats stats() const;

 private:
  // Wakes and tells when it ends: declared before the lock is taken, that is after
  // unlocking.
  struct WakeUps {
    explicit WakeUps(ItemQueue& q) : queue(q) {}
    ~WakeUps() {
      if (consumer) queue.consumers_.notify_one();
      for (const OnRoom& on_room : producers) on_room(is_open);
    }
    WakeUps(const WakeUps&) = delete;

    ItemQueue& queue;
    bool consumer = false;
    std::list<OnRoom> producers{};
    bool is_open = true;
  };

  // Tells the producers of items that have room now.
  void admit(WakeUps& wake) TB_REQUIRES(mutex_);
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
  bool closed_ TB_GUARDED_BY(mutex_) = false;
  std::deque<Item> items_ TB_GUARDED_BY(mutex_);
  int64_t num_entries_ TB_GUARDED_BY(mutex_) = 0;
  size_t idle_consumers_ TB_GUARDED_BY(mutex_) = 0;
  // A consumer was woken and none has looked at the items since.
  bool consumer_called_ TB_GUARDED_BY(mutex_) = false;
  uint64_t num_added_ TB_GUARDED_BY(mutex_) = 0;
  // The batches that wait for an answer, by the number of their first item.
  std::map<uint64_t, Calls> in_flight_ TB_GUARDED_BY(mutex_);

  std::atomic<uint64_t> num_batches_made_{0};
  std::atomic<uint64_t> num_items_joined_{0};
  std::atomic<uint64_t> num_entries_joined_{0};
  std::atomic<uint64_t> bytes_copied_{0};
};

// Throws ClosedBatchingQueue.
[[noreturn]] ArrayNest throw_closed();
// Throws std::invalid_argument, which names the place, if an answer does not fit a
// batch of this many entries.
void check_outputs(const ArrayNest& outputs, int64_t width,
                   const BatchingOptions& options);

}  // namespace torchbeast
