#include "item_queue.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace torchbeast {

namespace {

// Errors

// "at [0]["reward"]: int32 [5, 0] has 0 entries along dimension 1: ...".
[[noreturn]] void bad_array(const Array& array, const nest::Place& place,
                            const std::string& why) {
  throw std::invalid_argument("at " + place.str() + ": " + array.spec().to_string() +
                              " " + why);
}

std::string entries(int64_t number, size_t dim) {
  return "has " + std::to_string(number) + (number == 1 ? " entry" : " entries") +
         " along dimension " + std::to_string(dim);
}

// Checks that every array has `width` entries along the batch dimension, as `other` has
// them; 0: as many as the first. Returns how many.
int64_t check_entries(const ArrayNest& nest, const char* name, size_t dim,
                      int64_t width, const char* other) {
  nest.for_each([&](const Array& array, const nest::Place& place) {
    if (array.shape().size() <= dim) {
      bad_array(array, place,
                "has no dimension " + std::to_string(dim) + ", the batch dimension");
    }
    const int64_t size = array.shape()[dim];
    if (width == 0) width = size;
    if (size == width && size > 0) return;
    bad_array(array, place,
              entries(size, dim) + (width == 0 ? ": 1 is needed"
                                               : std::string(", but ") + other +
                                                     " has " + std::to_string(width)));
  });
  if (nest.empty()) {
    throw std::invalid_argument(std::string(name) + " without any array (" +
                                nest.describe() + "): there must be at least one");
  }
  return width;
}

// Checks an item by itself; returns its entries along the batch dimension.
int64_t check_item(const ArrayNest& item, const BatchingOptions& options) {
  const size_t dim = options.batch_dim;
  const int64_t width =
      check_entries(item, "an item", dim, 0, "the item's first array");
  if (width > options.maximum_batch_size) {
    throw std::invalid_argument("an item " + entries(width, dim) +
                                ", more than a whole batch: at most " +
                                std::to_string(options.maximum_batch_size) +
                                " (maximum_batch_size) are allowed");
  }
  return width;
}

void check_joinable(const ArrayNest& item, const ArrayNest& waiting, size_t dim) {
  const auto check = [&](const Array& old, const Array& array,
                         const nest::Place& place) {
    if (can_join(old.spec(), array.spec(), dim)) return;
    bad_array(array, place,
              "cannot be joined with the " + old.spec().to_string() +
                  " of an item that waits: dtype and all dimensions but " +
                  std::to_string(dim) + " must be equal");
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

ArrayNest throw_closed() { throw ClosedBatchingQueue("the queue is closed"); }

void check_outputs(const ArrayNest& outputs, int64_t width,
                   const BatchingOptions& options) {
  check_entries(outputs, "outputs", options.batch_dim, width,
                "the batch that it answers");
}

ItemQueue::ItemQueue(BatchingOptions options)
    : options_(check_options(std::move(options))), batches_(options_.allocator) {}

ItemQueue::Pushed ItemQueue::push(ArrayNest nest, OnDone on_done, OnRoom on_room) {
  const int64_t width = check_item(nest, options_);
  Item item{std::move(nest), width};
  std::list<OnRoom> own;  // takes memory before the lock
  if (on_room) own.push_back(std::move(on_room));
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  if (closed_) throw_closed();
  if (!items_.empty()) {
    check_joinable(item.nest, items_.back().nest, options_.batch_dim);
  }
  const Pushed pushed{num_added_ + 1, has_room()};
  items_.push_back(std::move(item));
  Item& added = items_.back();
  added.number = ++num_added_;
  added.arrival = Clock::now();
  added.call = Call(std::move(on_done));
  num_entries_ += added.width;
  if (!pushed.has_room) added.on_room.swap(own);
  // An item that only joins an incomplete batch changes nothing for consumers.
  if (is_complete() || items_.size() == 1) wake.consumer = needs_consumer();
  return pushed;
}

void ItemQueue::admit(WakeUps& wake) {
  const size_t most = options_.maximum_queue_size.value_or(0);
  for (size_t i = 0; i < std::min(most, items_.size()); ++i) {
    wake.producers.splice(wake.producers.end(), items_[i].on_room);
  }
}

std::vector<Item> ItemQueue::take(const Interrupt& interrupt, uint64_t* in_flight) {
  std::vector<Item> batch;
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  try {
    while (true) {
      consumer_called_ = false;
      if (closed_) return batch;
      if (is_complete()) break;
      if (!items_.empty() && options_.timeout && Clock::now() >= deadline()) break;
      size_t* const idle = &idle_consumers_;
      ++*idle;
      const AtEnd leaves([idle] { --*idle; });
      consumers_.wait_until(mutex_, deadline(), interrupt);
    }

    int64_t num_entries = 0;
    size_t number = 0;
    for (const Item& item : items_) {
      if (num_entries + item.width > options_.maximum_batch_size) break;
      num_entries += item.width;
      ++number;
    }
    batch.reserve(number);
    Calls* calls = nullptr;
    if (in_flight != nullptr) {
      Calls room;
      room.reserve(number);
      calls = &in_flight_.emplace(items_.front().number, std::move(room)).first->second;
      *in_flight = items_.front().number;
    }
    for (; number > 0; --number) {
      batch.push_back(std::move(items_.front()));
      if (calls != nullptr) calls->push_back(std::move(batch.back().call));
      wake.producers.splice(wake.producers.end(), batch.back().on_room);
      items_.pop_front();
    }
    num_entries_ -= num_entries;
  } catch (...) {
    consumer_called_ = false;
    wake.consumer = needs_consumer();
    throw;
  }
  wake.consumer = needs_consumer();
  admit(wake);
  return batch;
}

Calls ItemQueue::claim(uint64_t batch) {
  MutexLock lock(mutex_);
  auto found = in_flight_.extract(batch);
  return found.empty() ? Calls() : std::move(found.mapped());
}

void ItemQueue::withdraw(uint64_t number) {
  Item withdrawn;
  WakeUps wake(*this);
  MutexLock lock(mutex_);
  const auto item = std::find_if(items_.begin(), items_.end(), [&](const Item& item) {
    return item.number == number;
  });
  if (item == items_.end()) return;
  withdrawn = std::move(*item);
  items_.erase(item);
  num_entries_ -= withdrawn.width;
  admit(wake);
}

ArrayNest ItemQueue::join(std::vector<Item>& items) {
  int64_t width = 0;
  std::vector<ArrayNest> nests;
  nests.reserve(items.size());
  for (Item& item : items) {
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
  WakeUps wake(*this);
  wake.is_open = false;
  {
    MutexLock lock(mutex_);
    if (closed_) return false;
    closed_ = true;
    dropped.swap(items_);
    in_flight.swap(in_flight_);
    num_entries_ = 0;
    for (Item& item : dropped) {
      wake.producers.splice(wake.producers.end(), item.on_room);
    }
  }
  consumers_.notify_all();
  for (Item& item : dropped) item.call.finish(throw_closed);
  for (auto& [number, calls] : in_flight) {
    for (Call& call : calls) call.finish(throw_closed);
  }
  return true;
}

bool ItemQueue::is_closed() const {
  MutexLock lock(mutex_);
  return closed_;
}

size_t ItemQueue::size() const {
  MutexLock lock(mutex_);
  return std::min(items_.size(), options_.maximum_queue_size.value_or(items_.size()));
}

BatchingStats ItemQueue::stats() const {
  BatchingStats stats;
  stats.num_batches = num_batches_made_;
  stats.num_items = num_items_joined_;
  stats.num_entries = num_entries_joined_;
  stats.bytes_copied = bytes_copied_;
  stats.pool_bytes = batches_.num_bytes() + answers_.num_bytes();
  return stats;
}

}  // namespace torchbeast
