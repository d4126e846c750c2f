#include "batching.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace torchbeast {

namespace {

// Errors

bool find_place(const ArrayNest& nest, const nest::Place& place, size_t& leaves_before,
                std::string& found) {
  if (nest.is_leaf()) {
    if (leaves_before-- > 0) return false;
    found = place.str();
    return true;
  }
  if (nest.is_vector()) {
    for (size_t i = 0; i < nest.vector().size(); ++i) {
      const nest::Place child(place, i);
      if (find_place(nest.vector()[i], child, leaves_before, found)) return true;
    }
    return false;
  }
  for (const auto& [key, value] : nest.dict()) {
    const nest::Place child(place, key);
    if (find_place(value, child, leaves_before, found)) return true;
  }
  return false;
}

// "at [0]["reward"]: " for a leaf by its number. Checks only count leaves, and look for
// the place when there is something to say about it.
std::string at_leaf(const ArrayNest& nest, size_t number) {
  std::string place;
  find_place(nest, nest::Place(), number, place);
  return "at " + place + ": ";
}

std::string count(int64_t number, const char* one, const char* many) {
  return std::to_string(number) + " " + (number == 1 ? one : many);
}

std::string entries(int64_t number, size_t dim) {
  return count(number, "entry", "entries") + " along dimension " + std::to_string(dim);
}

void check_num_dims(const ArrayNest& nest, size_t leaf_number, const Array& array,
                    size_t dim) {
  const size_t num_dims = array.shape().size();
  if (num_dims > dim) return;
  throw std::invalid_argument(
      at_leaf(nest, leaf_number) + array.spec().to_string() + " has " +
      count(static_cast<int64_t>(num_dims), "dimension", "dimensions") +
      ", but the batch dimension is " + std::to_string(dim) + ": at least " +
      std::to_string(dim + 1) + " are needed");
}

// Checks an item by itself; returns its entries along the batch dimension.
int64_t check_item(const ArrayNest& item, const BatchingOptions& options) {
  const size_t dim = options.batch_dim;
  int64_t width = 0;
  size_t number = 0;
  item.for_each([&](const Array& array) {
    check_num_dims(item, number, array, dim);
    const int64_t size = array.shape()[dim];
    if (size < 1) {
      throw std::invalid_argument(at_leaf(item, number) + array.spec().to_string() +
                                  " has " + entries(size, dim) +
                                  ": at least 1 is needed");
    }
    if (number == 0) width = size;
    if (size != width) {
      throw std::invalid_argument(
          at_leaf(item, number) + array.spec().to_string() + " has " +
          entries(size, dim) + ", but the item's first array has " +
          std::to_string(width) + ": all arrays of an item must have the same number");
    }
    ++number;
  });
  if (number == 0) {
    throw std::invalid_argument(
        "an item without any array (" + item.describe() +
        "): there must be at least one, whose size along the batch dimension says how "
        "many entries the item has");
  }
  if (width > options.maximum_batch_size) {
    throw std::invalid_argument("an item has " + entries(width, dim) +
                                ", more than a whole batch: at most " +
                                std::to_string(options.maximum_batch_size) +
                                " (maximum_batch_size) are allowed");
  }
  return width;
}

bool can_join(const ArraySpec& a, const ArraySpec& b, size_t dim) {
  if (a.dtype != b.dtype || a.shape.size() != b.shape.size()) return false;
  for (size_t i = 0; i < a.shape.size(); ++i) {
    if (i != dim && a.shape[i] != b.shape[i]) return false;
  }
  return true;
}

void check_joinable(const ArrayNest& item, const ArrayNest& waiting, size_t dim) {
  size_t number = 0;
  const auto check = [&](const Array& old, const Array& array) {
    if (!can_join(old.spec(), array.spec(), dim)) {
      throw std::invalid_argument(
          at_leaf(item, number) + array.spec().to_string() +
          " cannot be joined with the " + old.spec().to_string() +
          " of an item that waits: dtype and all dimensions but " +
          std::to_string(dim) + " must be equal");
    }
    ++number;
  };
  try {
    nest::for_each2(check, waiting, item);
  } catch (const nest::StructureError& error) {
    throw std::invalid_argument(
        std::string("an item (the second) has another structure than one that waits "
                    "(the first): ") +
        error.what());
  }
}

void check_outputs(const ArrayNest& outputs, int64_t width,
                   const BatchingOptions& options) {
  const size_t dim = options.batch_dim;
  size_t number = 0;
  outputs.for_each([&](const Array& array) {
    check_num_dims(outputs, number, array, dim);
    const int64_t size = array.shape()[dim];
    if (options.check ? size != width : size < width) {
      throw std::invalid_argument(at_leaf(outputs, number) + array.spec().to_string() +
                                  " has " + entries(size, dim) +
                                  ", but the batch that it answers has " +
                                  std::to_string(width));
    }
    ++number;
  });
  if (number == 0) {
    throw std::invalid_argument("outputs without any array (" + outputs.describe() +
                                "): there must be at least one");
  }
}

BatchingOptions check_options(BatchingOptions options) {
  const auto require = [](bool ok, const std::string& text) {
    if (!ok) throw std::invalid_argument(text);
  };
  require(options.batch_dim < Shape::kMaxDims,
          "batch_dim must be less than " + std::to_string(Shape::kMaxDims) + ", not " +
              std::to_string(options.batch_dim));
  require(options.minimum_batch_size >= 1,
          "minimum_batch_size must be at least 1, not " +
              std::to_string(options.minimum_batch_size));
  require(options.maximum_batch_size >= options.minimum_batch_size,
          "maximum_batch_size must be at least minimum_batch_size, which is " +
              std::to_string(options.minimum_batch_size) + ", not " +
              std::to_string(options.maximum_batch_size));
  require(options.maximum_queue_size != size_t{0},
          "maximum_queue_size must be at least 1, not 0");
  if (options.timeout) {
    require(options.timeout->count() >= 0,
            "timeout must not be negative, which " +
                std::to_string(options.timeout->count()) + " ms is");
    options.timeout = clamp_limit(*options.timeout);
  }
  return options;
}

const char kClosed[] = "the queue is closed";

// One caller of DynamicBatcher::compute, who waits for an answer. The caller holds it
// and so does the batch: the last one lets it go.
class Call {
 public:
  // The first answer counts, later ones are ignored.
  void answer(ArrayNest outputs) { finish(kAnswered, std::move(outputs), nullptr); }
  void fail(std::shared_ptr<const std::string> message) {
    finish(kFailed, ArrayNest(), std::move(message));
  }
  void close() { finish(kClosedQueue, ArrayNest(), nullptr); }

  ArrayNest wait(const Interrupt& interrupt) {
    MutexLock lock(mutex_);
    while (state_ == kWaiting) {
      done_.wait_until(mutex_, Clock::time_point::max(), interrupt);
    }
    if (state_ == kFailed) throw AsyncError(*message_);
    if (state_ == kClosedQueue) throw ClosedBatchingQueue(kClosed);
    return std::move(outputs_);
  }

 private:
  enum State { kWaiting, kAnswered, kFailed, kClosedQueue };

  void finish(State state, ArrayNest outputs,
              std::shared_ptr<const std::string> message) {
    {
      MutexLock lock(mutex_);
      if (state_ != kWaiting) return;
      state_ = state;
      outputs_ = std::move(outputs);
      message_ = std::move(message);
    }
    done_.notify_one();
  }

  Mutex mutex_;
  CondVar done_;
  State state_ TB_GUARDED_BY(mutex_) = kWaiting;
  ArrayNest outputs_ TB_GUARDED_BY(mutex_);
  std::shared_ptr<const std::string> message_ TB_GUARDED_BY(mutex_);
};

using Calls = std::vector<std::shared_ptr<Call>>;

struct Item {
  ArrayNest nest;
  std::shared_ptr<Call> call;  // nullptr in a BatchingQueue
  int64_t width = 1;           // entries along the batch dimension
  Clock::time_point arrival{};
};

// Adds the time from start() to its end to a sum over threads.
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<int64_t>& nanoseconds) : nanoseconds_(nanoseconds) {}
  ~Stopwatch() {
    if (!started_) return;
    const auto time = Clock::now() - *started_;
    nanoseconds_ += std::chrono::nanoseconds(time).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  void start() {
    if (!started_) started_ = Clock::now();
  }

 private:
  std::atomic<int64_t>& nanoseconds_;
  std::optional<Clock::time_point> started_;
};

}  // namespace

// What is inside it, and what is outside its lock:
// - Threads are woken after unlocking, one for each thing there is to do. At most one
//   consumer is on its way at a time; it takes all that fits into its batch, and wakes
//   the next if there is more. So items that arrive close together share a batch, and
//   no crowd runs for one item.
// - Who leaves without doing what it may have been woken for (an interrupt, a faulty
//   item) wakes the next.
// - Items move in and out under the lock; arrays are copied and destroyed outside.
class ItemQueue {
 public:
  explicit ItemQueue(BatchingOptions options)
      : options_(check_options(std::move(options))), batches_(options_.allocator) {}

  const BatchingOptions& options() const { return options_; }

  void push(ArrayNest nest, std::shared_ptr<Call> call, const Interrupt& interrupt)
      TB_EXCLUDES(mutex_);

  // The items of the next batch; none once it is closed. In a DynamicBatcher `calls`
  // are theirs, and close() ends them until they are forgotten.
  std::vector<Item> take(const Interrupt& interrupt,
                         std::shared_ptr<Calls>* calls = nullptr) TB_EXCLUDES(mutex_);
  void forget(const std::shared_ptr<Calls>& calls) TB_EXCLUDES(mutex_);
  // Takes back the item of a caller who leaves, if it still waits.
  void withdraw(const Call* call) TB_EXCLUDES(mutex_);

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
  std::unordered_set<std::shared_ptr<Calls>> in_flight_ TB_GUARDED_BY(mutex_);

  std::atomic<uint64_t> num_batches_made_{0};
  std::atomic<uint64_t> num_items_joined_{0};
  std::atomic<uint64_t> num_entries_joined_{0};
  std::atomic<uint64_t> bytes_copied_{0};
  std::atomic<int64_t> consumer_wait_{0};  // nanoseconds
  std::atomic<int64_t> producer_wait_{0};
};

void ItemQueue::push(ArrayNest nest, std::shared_ptr<Call> call,
                     const Interrupt& interrupt) {
  Item item{std::move(nest), std::move(call)};
  if (options_.check) {
    item.width = check_item(item.nest, options_);
  } else if (!item.nest.empty()) {
    // Only to count; what is wrong is found by join().
    const Shape& shape = item.nest.front().shape();
    if (shape.size() > options_.batch_dim) {
      item.width = std::clamp<int64_t>(shape[options_.batch_dim], 1,
                                       options_.maximum_batch_size);
    }
  }

  Stopwatch stopwatch(producer_wait_);
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  try {
    while (!closed_ && !has_room()) {
      stopwatch.start();
      ++blocked_producers_;
      try {
        room_.wait_until(mutex_, Clock::time_point::max(), interrupt);
      } catch (...) {
        --blocked_producers_;
        throw;
      }
      --blocked_producers_;
    }
    if (closed_) throw ClosedBatchingQueue(kClosed);
    if (options_.check && !items_.empty()) {
      check_joinable(item.nest, items_.back().nest, options_.batch_dim);
    }
    item.arrival = Clock::now();
    const int64_t width = item.width;
    items_.push_back(std::move(item));
    num_entries_ += width;
  } catch (...) {
    if (has_room()) wake.producers = std::min<size_t>(1, blocked_producers_);
    throw;
  }
  // An item that only joins an incomplete batch changes nothing for consumers.
  if (is_complete() || items_.size() == 1) wake.consumer = needs_consumer();
}

std::vector<Item> ItemQueue::take(const Interrupt& interrupt,
                                  std::shared_ptr<Calls>* calls) {
  std::vector<Item> batch;
  Stopwatch stopwatch(consumer_wait_);
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  while (true) {
    consumer_called_ = false;
    if (closed_) return batch;
    if (is_complete()) break;
    if (!items_.empty() && options_.timeout && Clock::now() >= deadline()) break;
    stopwatch.start();
    ++idle_consumers_;
    try {
      consumers_.wait_until(mutex_, deadline(), interrupt);
    } catch (...) {
      --idle_consumers_;
      consumer_called_ = false;
      wake.consumer = needs_consumer();
      throw;
    }
    --idle_consumers_;
  }

  // At least one: an unchecked item that is too wide must come out, too.
  int64_t num_entries = 0;
  do {
    num_entries += items_.front().width;
    batch.push_back(std::move(items_.front()));
    items_.pop_front();
  } while (!items_.empty() &&
           num_entries + items_.front().width <= options_.maximum_batch_size);
  num_entries_ -= num_entries;
  if (calls != nullptr) {
    *calls = std::make_shared<Calls>();
    for (const Item& item : batch) (*calls)->push_back(item.call);
    in_flight_.insert(*calls);
  }
  wake.consumer = needs_consumer();
  wake.producers = std::min(batch.size(), blocked_producers_);
  return batch;
}

void ItemQueue::forget(const std::shared_ptr<Calls>& calls) {
  MutexLock lock(mutex_);
  in_flight_.erase(calls);
}

void ItemQueue::withdraw(const Call* call) {
  Item withdrawn;
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  const auto item =
      std::find_if(items_.begin(), items_.end(),
                   [&](const Item& waiting) { return waiting.call.get() == call; });
  if (item == items_.end()) return;
  withdrawn = std::move(*item);
  items_.erase(item);
  num_entries_ -= withdrawn.width;
  wake.producers = std::min<size_t>(1, blocked_producers_);
}

ArrayNest ItemQueue::join(std::vector<Item>& items) {
  int64_t width = 0;
  std::vector<ArrayNest> nests;
  nests.reserve(items.size());
  for (Item& item : items) {
    if (!options_.check) {
      item.width = check_item(item.nest, options_);
      if (!nests.empty()) {
        check_joinable(item.nest, nests.front(), options_.batch_dim);
      }
    }
    width += item.width;
    nests.push_back(std::move(item.nest));
  }

  ArrayNest batch;
  if (nests.size() == 1 && !options_.allocator) {
    batch = std::move(nests.front());
  } else {
    uint64_t bytes = 0;
    batch = nest::zip(std::move(nests)).map([&](const std::vector<Array>& arrays) {
      Array joined = concatenate(arrays, options_.batch_dim, batches_, false);
      bytes += joined.num_bytes();
      return joined;
    });
    bytes_copied_ += bytes;
  }
  num_batches_made_ += 1;
  num_items_joined_ += items.size();
  num_entries_joined_ += static_cast<uint64_t>(width);
  return batch;
}

ArrayNest ItemQueue::part(const ArrayNest& outputs, int64_t begin, int64_t width) {
  uint64_t bytes = 0;
  ArrayNest result = outputs.map([&](const Array& array) {
    Array piece = slice(array, options_.batch_dim, begin, begin + width, answers_);
    bytes += piece.num_bytes();
    return piece;
  });
  bytes_copied_ += bytes;
  return result;
}

bool ItemQueue::close() {
  std::deque<Item> dropped;
  std::unordered_set<std::shared_ptr<Calls>> in_flight;
  {
    MutexLock lock(mutex_);
    if (closed_) return false;
    closed_ = true;
    dropped.swap(items_);
    in_flight.swap(in_flight_);
    num_entries_ = 0;
  }
  consumers_.notify_all();
  room_.notify_all();
  for (const Item& item : dropped) {
    if (item.call) item.call->close();
  }
  for (const std::shared_ptr<Calls>& calls : in_flight) {
    for (const std::shared_ptr<Call>& call : *calls) call->close();
  }
  return true;
}

bool ItemQueue::is_closed() const {
  MutexLock lock(mutex_);
  return closed_;
}

size_t ItemQueue::size() const {
  MutexLock lock(mutex_);
  return items_.size();
}

BatchingStats ItemQueue::stats() const {
  BatchingStats stats;
  stats.num_batches = num_batches_made_;
  stats.num_items = num_items_joined_;
  stats.num_entries = num_entries_joined_;
  stats.bytes_copied = bytes_copied_;
  stats.pool_bytes = batches_.num_bytes() + answers_.num_bytes();
  stats.consumer_wait_seconds = static_cast<double>(consumer_wait_) * 1e-9;
  stats.producer_wait_seconds = static_cast<double>(producer_wait_) * 1e-9;
  return stats;
}

// BatchingQueue

BatchingQueue::BatchingQueue(BatchingOptions options)
    : queue_(std::make_shared<ItemQueue>(std::move(options))) {}

BatchingQueue::~BatchingQueue() { close(); }

void BatchingQueue::enqueue(ArrayNest item, const Interrupt& interrupt) {
  queue_->push(std::move(item), nullptr, interrupt);
}

std::optional<ArrayNest> BatchingQueue::dequeue(const Interrupt& interrupt) {
  std::vector<Item> items = queue_->take(interrupt);
  if (items.empty()) return std::nullopt;
  return queue_->join(items);
}

size_t BatchingQueue::size() const { return queue_->size(); }
bool BatchingQueue::is_closed() const { return queue_->is_closed(); }
bool BatchingQueue::close() { return queue_->close(); }
BatchingStats BatchingQueue::stats() const { return queue_->stats(); }

// DynamicBatcher

// The callers of one batch, and whether they have been answered.
struct DynamicBatcher::Batch::State {
  State(std::shared_ptr<ItemQueue> item_queue, std::shared_ptr<Calls> batch_calls)
      : queue(std::move(item_queue)), calls(std::move(batch_calls)) {}
  ~State() {
    if (is_answered()) return;
    fail("the batch was dropped without an answer");
  }

  bool is_answered() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    return answered;
  }
  // For whoever comes first; std::runtime_error for all others.
  void claim() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    if (answered) throw_answered();
    answered = true;
  }
  [[noreturn]] static void throw_answered() {
    throw std::runtime_error(
        "the batch was answered before: call set_outputs or set_error once");
  }
  void fail(const std::string& text) {
    claim();
    const auto message = std::make_shared<const std::string>(text);
    for (const std::shared_ptr<Call>& call : *calls) call->fail(message);
    queue->forget(calls);
  }

  const std::shared_ptr<ItemQueue> queue;
  const std::shared_ptr<Calls> calls;
  std::vector<int64_t> widths;  // of each call
  int64_t size = 0;             // their sum
  Mutex mutex;
  bool answered TB_GUARDED_BY(mutex) = false;
};

DynamicBatcher::DynamicBatcher(BatchingOptions options)
    : queue_(std::make_shared<ItemQueue>(std::move(options))) {}

DynamicBatcher::~DynamicBatcher() { close(); }

ArrayNest DynamicBatcher::compute(ArrayNest inputs, const Interrupt& interrupt) {
  const auto call = std::make_shared<Call>();
  queue_->push(std::move(inputs), call, interrupt);
  Stopwatch stopwatch(queue_->producer_wait());
  stopwatch.start();
  try {
    return call->wait(interrupt);
  } catch (...) {
    queue_->withdraw(call.get());
    throw;
  }
}

std::shared_ptr<DynamicBatcher::Batch> DynamicBatcher::next(
    const Interrupt& interrupt) {
  while (true) {
    std::shared_ptr<Calls> calls;
    std::vector<Item> items = queue_->take(interrupt, &calls);
    if (items.empty()) return nullptr;
    auto state = std::make_unique<Batch::State>(queue_, std::move(calls));
    try {
      ArrayNest inputs = queue_->join(items);
      for (const Item& item : items) {
        state->widths.push_back(item.width);
        state->size += item.width;
      }
      return std::make_shared<Batch>(std::move(inputs), std::move(state));
    } catch (const std::invalid_argument& error) {
      // The callers' mistake, not the consumer's.
      state->fail(error.what());
    } catch (const std::exception& error) {
      if (state) state->fail(error.what());
      throw;
    }
  }
}

size_t DynamicBatcher::size() const { return queue_->size(); }
bool DynamicBatcher::is_closed() const { return queue_->is_closed(); }
bool DynamicBatcher::close() { return queue_->close(); }
BatchingStats DynamicBatcher::stats() const { return queue_->stats(); }

DynamicBatcher::Batch::Batch(ArrayNest inputs, std::unique_ptr<State> state)
    : inputs_(std::move(inputs)), state_(std::move(state)) {}

DynamicBatcher::Batch::~Batch() = default;

int64_t DynamicBatcher::Batch::size() const { return state_->size; }

void DynamicBatcher::Batch::set_outputs(const ArrayNest& outputs) {
  ItemQueue& queue = *state_->queue;
  if (state_->is_answered()) State::throw_answered();
  if (queue.is_closed()) {
    state_->claim();
    return;
  }
  check_outputs(outputs, state_->size, queue.options());
  std::vector<ArrayNest> parts;
  parts.reserve(state_->widths.size());
  int64_t begin = 0;
  for (int64_t width : state_->widths) {
    parts.push_back(queue.part(outputs, begin, width));
    begin += width;
  }
  state_->claim();
  for (size_t i = 0; i < parts.size(); ++i) {
    (*state_->calls)[i]->answer(std::move(parts[i]));
  }
  queue.forget(state_->calls);
}

void DynamicBatcher::Batch::set_error(const std::string& message) {
  state_->fail(message);
}

}  // namespace torchbeast
