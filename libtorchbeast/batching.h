// Queues that join what many threads bring into batches.
//
// BatchingQueue: producers enqueue nests of arrays, consumers take them joined along
// the batch dimension. DynamicBatcher: the same, and every producer waits for its part
// of the consumer's answer.
//
// An item may be wider than 1 along the batch dimension: E environments of one stream
// pass through together. Sizes of batches count entries along that dimension; sizes of
// queues count items.
//
// A batch is what waits, oldest first, up to the maximum size. It is complete when
// - its entries reach the minimum, or
// - the next item would exceed the maximum, or
// - the timeout has elapsed since its oldest item came, or
// - the queue is full: with small items and a large minimum nobody could ever go on.
//
// Copies: an item's arrays are held by reference until its batch is made, then copied
// once. A batch of a single item is the item itself, without a copy, unless an
// allocator is given.
//
// No lock is held while arrays are copied or destroyed, because both may take long.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "array.h"
#include "sync.h"

namespace torchbeast {

// The queue was closed before or during a call.
class ClosedBatchingQueue : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The batch that a computation was part of will never be answered.
class AsyncError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct BatchingOptions {
  size_t batch_dim = 1;
  // Entries along batch_dim.
  int64_t minimum_batch_size = 1;
  int64_t maximum_batch_size = 1024;
  // How long an incomplete batch waits, from its oldest item's arrival; none: for ever.
  std::optional<Milliseconds> timeout;
  // Items: how many may wait before enqueue blocks; none: any number. compute waits for
  // its answer in any case, and ask does not wait.
  std::optional<size_t> maximum_queue_size;
  // Makes the memory of batches, see MemoryPool; answers are in ordinary memory.
  MemoryPool::Allocator allocator;
};

struct BatchingStats {
  uint64_t num_batches = 0;
  uint64_t num_items = 0;     // in these batches
  uint64_t num_entries = 0;   // along the batch dimension
  uint64_t bytes_copied = 0;  // into batches and, for the batcher, out of answers
  uint64_t pool_bytes = 0;    // memory held for batches and answers
};

// What both queues are made of: waiting items, and the rules by which they become a
// batch. See item_queue.h.
class ItemQueue;
class Call;

// What both queues have in common. Thread-safe.
class BatchingBase {
 public:
  BatchingBase(const BatchingBase&) = delete;

  size_t size() const;  // items waiting, at most the maximum
  int64_t maximum_batch_size() const;
  size_t batch_dim() const;
  bool is_closed() const;
  // Wakes everybody and drops what waits. Returns false if it was closed already.
  bool close();
  BatchingStats stats() const;

 protected:
  // Throws std::invalid_argument on sizes that make no sense.
  explicit BatchingBase(BatchingOptions options);
  ~BatchingBase();  // closes

  const std::shared_ptr<ItemQueue> queue_;
};

// Thread-safe.
class BatchingQueue : public BatchingBase {
 public:
  explicit BatchingQueue(BatchingOptions options) : BatchingBase(std::move(options)) {}

  // Blocks while the queue is full. Throws ClosedBatchingQueue if it is closed before
  // there is room; std::invalid_argument, naming the place in the nest, on a nest
  // without arrays, an array with too few dimensions, arrays whose sizes along
  // batch_dim differ or are 0, an item wider than the maximum, or one that can't be
  // joined with those waiting. If `interrupt` throws, the item is withdrawn, unless a
  // batch has it already.
  void enqueue(ArrayNest item, const Interrupt& interrupt = nullptr);

  // The same without blocking: takes the item, and returns whether there is room for
  // it. If not, its producer should bring no more until `on_room` is called, once: with
  // true, or with false if the queue was closed before; in the thread that takes a
  // batch, closes the queue or leaves the line. It must not block, nor throw, and no
  // lock is held.
  using OnRoom = std::function<void(bool)>;
  bool offer(ArrayNest item, OnRoom on_room);

  // Blocks until a batch is complete; nothing once the queue is closed.
  std::optional<ArrayNest> dequeue(const Interrupt& interrupt = nullptr);
};

// Thread-safe.
class DynamicBatcher : public BatchingBase {
 public:
  class Batch;

  explicit DynamicBatcher(BatchingOptions options) : BatchingBase(std::move(options)) {}

  // Blocks until a consumer has answered, and returns this item's part of the answer:
  // of every array the entries along batch_dim that belong to it, in memory of its own.
  // Throws ClosedBatchingQueue as soon as the batcher is closed, AsyncError if the
  // batch was dropped or failed, std::invalid_argument as enqueue does. If `interrupt`
  // throws, the item is withdrawn, or its answer ignored.
  ArrayNest compute(ArrayNest inputs, const Interrupt& interrupt = nullptr);

  // The same without blocking; there is always room. `on_done` is called once with a
  // function that returns, once, what compute() would, or throws: in the thread that
  // answers or closes the batcher, or in this one. It must not block, nor throw, and no
  // lock is held. Throws as compute() does before it waits; then there is no call.
  using Answer = std::function<ArrayNest()>;
  void ask(ArrayNest inputs, std::function<void(Answer&)> on_done);

  // Blocks until a batch is complete; nothing once the batcher is closed. What the
  // allocator throws, comes through, and the callers get AsyncError.
  std::shared_ptr<Batch> next(const Interrupt& interrupt = nullptr);
};

// Thread-safe. Must be answered; if it is destroyed unanswered, its callers get
// AsyncError. It may outlive its batcher.
class DynamicBatcher::Batch {
 public:
  explicit Batch(std::shared_ptr<ItemQueue> queue);  // for DynamicBatcher
  ~Batch();
  Batch(const Batch&) = delete;

  const ArrayNest& inputs() const { return inputs_; }
  int64_t size() const { return size_; }  // entries along batch_dim

  // Answers. Throws std::invalid_argument, naming the place, if an array of `outputs`
  // has not size() entries along batch_dim or there is none, and then the batch can
  // still be answered; std::runtime_error if it was answered before. After close()
  // nobody is waiting and nothing is checked or copied.
  void set_outputs(const ArrayNest& outputs);
  // The callers get AsyncError with this text. std::runtime_error if answered before.
  void set_error(const std::string& message);

 private:
  friend class DynamicBatcher;

  // The calls that are to be answered. Throws if there was an answer.
  std::vector<Call> claim();

  const std::shared_ptr<ItemQueue> queue_;
  uint64_t number_ = 0;  // for ItemQueue::claim
  ArrayNest inputs_;
  std::vector<int64_t> widths_;  // of each call
  int64_t size_ = 0;             // their sum
  std::atomic<bool> answered_{false};
};

}  // namespace torchbeast
