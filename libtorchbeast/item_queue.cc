#include "item_queue.h"

#include <algorithm>
#include <stdexcept>
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
            "timeout must be at least 0 ms, not " +
                std::to_string(options.timeout->count()) + " ms");
    options.timeout = clamp_limit(*options.timeout);
  }
  return options;
}

}  // namespace

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

ItemQueue::ItemQueue(BatchingOptions options)
    : options_(check_options(std::move(options))), batches_(options_.allocator) {}

Item ItemQueue::make_item(ArrayNest nest, Call call) const {
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
  return item;
}

void ItemQueue::add(Item& item, WakeUps& wake) {
  if (closed_) throw ClosedBatchingQueue("the queue is closed");
  if (options_.check && !items_.empty()) {
    check_joinable(item.nest, items_.back().nest, options_.batch_dim);
  }
  item.arrival = Clock::now();
  num_entries_ += item.width;
  items_.push_back(std::move(item));
  // An item that only joins an incomplete batch changes nothing for consumers.
  if (is_complete() || items_.size() == 1) wake.consumer = needs_consumer();
}

void ItemQueue::push(ArrayNest nest, Call call, const Interrupt& interrupt) {
  Item item = make_item(std::move(nest), std::move(call));
  Stopwatch stopwatch(producer_wait_, false);
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
    add(item, wake);
  } catch (...) {
    if (has_room()) wake.producers = std::min<size_t>(1, blocked_producers_);
    throw;
  }
}

bool ItemQueue::try_push(ArrayNest& nest, Call call) {
  Item item = make_item(std::move(nest), std::move(call));
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  if (item.call.is_of(nullptr) && !closed_ && !has_room()) {
    nest = std::move(item.nest);
    return false;
  }
  add(item, wake);
  return true;
}

std::vector<Item> ItemQueue::take(const Interrupt& interrupt,
                                  const std::shared_ptr<Calls>& calls) {
  std::vector<Item> batch;
  Stopwatch stopwatch(consumer_wait_, false);
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
  size_t number = 0;
  int64_t num_entries = 0;
  for (const Item& item : items_) {
    if (number > 0 && num_entries + item.width > options_.maximum_batch_size) break;
    num_entries += item.width;
    ++number;
  }
  try {
    batch.reserve(number);
    if (calls) {
      calls->reserve(number);
      in_flight_.emplace(calls.get(), calls);
    }
  } catch (...) {
    wake.consumer = needs_consumer();
    throw;
  }
  for (; number > 0; --number) {
    batch.push_back(std::move(items_.front()));
    if (calls) calls->push_back(std::move(batch.back().call));
    items_.pop_front();
  }
  num_entries_ -= num_entries;
  wake.consumer = needs_consumer();
  wake.producers = std::min(batch.size(), blocked_producers_);
  return batch;
}

void ItemQueue::forget(const Calls* calls) {
  MutexLock lock(mutex_);
  in_flight_.erase(calls);
}

void ItemQueue::withdraw(const Waiter* waiter) {
  Item withdrawn;
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  const auto item = std::find_if(items_.begin(), items_.end(), [&](const Item& item) {
    return item.call.is_of(waiter);
  });
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
      Array joined = concatenate(arrays, options_.batch_dim, batches_);
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
  decltype(in_flight_) in_flight;
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
  for (const Item& item : dropped) item.call.close();
  for (const auto& batch : in_flight) {
    const std::shared_ptr<const Calls> calls = batch.second.lock();
    if (!calls) continue;
    for (const Call& call : *calls) call.close();
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

}  // namespace torchbeast
