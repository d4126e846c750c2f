#include "batching.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <limits>
#include <random>

#include "test_util.h"

namespace torchbeast {
namespace {

using std::chrono::seconds;
using Map = ArrayNest::Map;
using Vector = ArrayNest::Vector;
using Values = std::vector<int32_t>;

class BatchingTest : public GuardedTest {};
class BatchingQueueTest : public BatchingTest {};
class DynamicBatcherTest : public BatchingTest {};

BatchingOptions sizes(int64_t minimum, int64_t maximum) {
  BatchingOptions options;
  options.minimum_batch_size = minimum;
  options.maximum_batch_size = maximum;
  return options;
}

BatchingOptions with_timeout(BatchingOptions options, int64_t milliseconds) {
  options.timeout = Milliseconds(milliseconds);
  return options;
}

BatchingOptions with_queue_size(BatchingOptions options, size_t size) {
  options.maximum_queue_size = size;
  return options;
}

BatchingOptions unchecked(BatchingOptions options) {
  options.check = false;
  return options;
}

// An item [2, width, 3] whose values start with `first`.
ArrayNest item(int64_t width, int32_t first = 0) {
  return numbered({2, width, 3}, first);
}

// Says when a thread waits inside a call, since only then is it interrupted.
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

// An array that asks the queue something when it ends: with the lock of the queue held,
// it would never end.
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

std::future<ArrayNest> async_compute(DynamicBatcher& batcher, ArrayNest inputs,
                                     const Interrupt& interrupt = nullptr) {
  return std::async(std::launch::async,
                    [&batcher, inputs = std::move(inputs), interrupt]() mutable {
                      return batcher.compute(std::move(inputs), interrupt);
                    });
}

// So that most probably they wait in a call by then. Nothing depends on it but how
// often a test meets the case that it is about.
void let_others_run() {
  const auto end = Clock::now() + std::chrono::microseconds(500);
  while (Clock::now() < end) std::this_thread::yield();
}

// A lost wake-up costs up to a second (kLookPeriod). This measures, round by round,
// what must follow at once, and fails where it takes so long in more than a tenth of
// the rounds; a busy machine may be late now and then.
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

// Options

template <typename Queue>
void test_options() {
  const auto refusal = [](BatchingOptions options) {
    return error_of<std::invalid_argument>([&] { Queue queue(options); });
  };
  EXPECT_EQ(refusal(sizes(0, 5)), "minimum_batch_size must be at least 1, not 0");
  EXPECT_EQ(refusal(sizes(-3, 5)), "minimum_batch_size must be at least 1, not -3");
  EXPECT_EQ(
      refusal(sizes(5, 4)),
      "maximum_batch_size must be at least minimum_batch_size, which is 5, not 4");
  EXPECT_EQ(refusal(with_timeout(sizes(1, 5), -1)),
            "timeout must not be negative, which -1 ms is");
  EXPECT_EQ(refusal(with_queue_size(sizes(1, 5), 0)),
            "maximum_queue_size must be at least 1, not 0");
  BatchingOptions far_dim;
  far_dim.batch_dim = 8;
  EXPECT_EQ(refusal(far_dim), "batch_dim must be less than 8, not 8");
  EXPECT_EQ(refusal(with_queue_size(with_timeout(sizes(5, 5), 0), 1)), "nothing");
}

TEST_F(BatchingQueueTest, RefusesSizesWithoutSense) { test_options<BatchingQueue>(); }
TEST_F(DynamicBatcherTest, RefusesSizesWithoutSense) { test_options<DynamicBatcher>(); }

TEST_F(BatchingQueueTest, EndlessTimeoutIsATime) {
  BatchingQueue queue(with_timeout(sizes(2, 2), std::numeric_limits<int64_t>::max()));
  queue.enqueue(item(1));
  auto batch = std::async(std::launch::async, [&] { return queue.dequeue(); });
  queue.enqueue(item(1));
  EXPECT_TRUE(batch.get());
}

// Joining

TEST_F(BatchingQueueTest, JoinsAlongEveryBatchDim) {
  for (size_t dim = 0; dim < 3; ++dim) {
    BatchingOptions options = sizes(1, 100);
    options.batch_dim = dim;
    BatchingQueue queue(options);
    std::vector<Array> arrays;
    for (int32_t width : {2, 1, 4}) {
      Shape shape{5, 3, 7};
      shape[dim] = width;
      arrays.push_back(numbered(shape, 1000 * width));
      queue.enqueue(arrays.back());
    }
    EXPECT_EQ(queue.size(), 3u);
    const auto batch = queue.dequeue();
    ASSERT_TRUE(batch);
    expect_same(batch->leaf(), naive_concatenate(arrays, dim));
    EXPECT_EQ(queue.size(), 0u);
  }
}

TEST_F(BatchingQueueTest, JoinsNests) {
  BatchingQueue queue(sizes(1, 100));
  std::vector<Array> frames, rewards;
  for (int32_t width : {3, 1, 2}) {
    frames.push_back(numbered({5, width, 7}, 100 * width));
    rewards.push_back(numbered({5, width}, -width));
    queue.enqueue(
        Vector{Map{{"frame", frames.back()}, {"reward", rewards.back()}}, Vector{}});
  }
  const ArrayNest batch = queue.dequeue().value();
  ASSERT_EQ(batch.vector().size(), 2u);
  expect_same(batch.vector()[0].dict().at("frame").leaf(),
              naive_concatenate(frames, 1));
  expect_same(batch.vector()[0].dict().at("reward").leaf(),
              naive_concatenate(rewards, 1));
  EXPECT_TRUE(batch.vector()[1].vector().empty());
}

TEST_F(BatchingQueueTest, SingleItemIsNotCopied) {
  BatchingQueue queue(sizes(1, 100));
  const ArrayNest one = item(4);
  queue.enqueue(one);
  EXPECT_EQ(queue.dequeue()->leaf().data(), one.leaf().data());
  EXPECT_EQ(queue.stats().bytes_copied, 0u);
}

TEST_F(BatchingQueueTest, AllocatorGivesTheMemory) {
  std::vector<uint8_t> pinned(4096);
  size_t num_blocks = 0;
  BatchingOptions options = sizes(1, 100);
  options.allocator = [&](size_t num_bytes) {
    EXPECT_LE(num_bytes, pinned.size());
    ++num_blocks;
    return MemoryPool::Block{pinned.data(), nullptr};
  };
  BatchingQueue queue(options);
  const ArrayNest one = item(4, 17);
  for (int i = 0; i < 3; ++i) {
    queue.enqueue(one);
    const ArrayNest batch = queue.dequeue().value();
    EXPECT_EQ(batch.leaf().data(), pinned.data());
    expect_same(batch.leaf(), one.leaf());
  }
  EXPECT_EQ(num_blocks, 1u);
}

TEST_F(BatchingQueueTest, BatchMemoryIsUsedAgain) {
  BatchingQueue queue(sizes(1, 100));
  size_t held = 0;
  for (int i = 0; i < 1000; ++i) {
    queue.enqueue(item(2));
    queue.enqueue(item(3));
    queue.dequeue();
    if (i == 0) held = queue.stats().pool_bytes;
  }
  EXPECT_GT(held, 0u);
  EXPECT_EQ(queue.stats().pool_bytes, held);
}

// When a batch is complete

TEST_F(BatchingQueueTest, MinimumCountsEntries) {
  BatchingQueue queue(sizes(5, 100));
  queue.enqueue(item(2));
  queue.enqueue(item(2));
  Waiting waiting;
  auto batch = std::async(std::launch::async,
                          [&] { return queue.dequeue(waiting.interrupt()); });
  waiting.wait();  // 4 entries are not enough
  EXPECT_EQ(queue.size(), 2u);
  queue.enqueue(item(3));
  EXPECT_EQ(batch.get()->leaf().shape(), (Shape{2, 7, 3}));
}

TEST_F(BatchingQueueTest, MinimumHoldsForEveryBatch) {
  BatchingQueue queue(sizes(3, 4));
  for (int i = 0; i < 2; ++i) {
    queue.enqueue(item(2));
    queue.enqueue(item(2));
    EXPECT_EQ(queue.dequeue()->leaf().shape()[1], 4);
  }
  queue.enqueue(item(2));
  Waiting waiting;
  waiting.stop();
  EXPECT_THROW(queue.dequeue(waiting.interrupt()), std::domain_error);
}

TEST_F(BatchingQueueTest, MaximumIsNeverExceeded) {
  BatchingQueue queue(sizes(5, 5));
  queue.enqueue(item(3, 0));
  queue.enqueue(item(4, 100));  // complete: this one would exceed the maximum
  EXPECT_EQ(queue.dequeue()->leaf().shape(), (Shape{2, 3, 3}));
  queue.enqueue(item(1, 200));  // just full
  queue.enqueue(item(5, 300));
  EXPECT_EQ(queue.dequeue()->leaf().shape(), (Shape{2, 5, 3}));
  EXPECT_EQ(queue.dequeue()->leaf().shape(), (Shape{2, 5, 3}));
  EXPECT_EQ(queue.size(), 0u);
}

TEST_F(BatchingQueueTest, OldestFirst) {
  BatchingQueue queue(sizes(1, 2));
  for (int32_t i = 0; i < 5; ++i) queue.enqueue(item(1, 100 * i));
  EXPECT_EQ(values_of(queue.dequeue()->leaf()),
            (Values{0, 1, 2, 100, 101, 102, 3, 4, 5, 103, 104, 105}));
  EXPECT_EQ(values_of(queue.dequeue()->leaf())[0], 200);
  EXPECT_EQ(values_of(queue.dequeue()->leaf()), (Values{400, 401, 402, 403, 404, 405}));
}

TEST_F(BatchingQueueTest, TimeoutHandsOutAPartialBatch) {
  BatchingQueue queue(with_timeout(sizes(10, 10), 40));
  // Whether the consumer or the item is there first.
  for (bool consumer_first : {false, true}) {
    std::future<std::optional<ArrayNest>> batch;
    const auto consume = [&] {
      batch = std::async(std::launch::async, [&] { return queue.dequeue(); });
    };
    if (consumer_first) consume();
    const auto start = Clock::now();
    queue.enqueue(item(2));
    queue.enqueue(item(1));
    if (!consumer_first) consume();
    EXPECT_EQ(batch.get()->leaf().shape()[1], 3);
    EXPECT_GE(Clock::now() - start, Milliseconds(40));
    EXPECT_LT(Clock::now() - start, seconds(20));
  }
}

TEST_F(BatchingQueueTest, TimeoutOfAWaitingConsumerIsPrompt) {
  BatchingQueue queue(with_timeout(sizes(10, 10), 5));
  std::atomic<int> done{0};
  Threads threads;
  threads.start([&] {
    while (queue.dequeue()) ++done;
  });
  Promptness promptness;
  for (int i = 0; i < 20; ++i) {
    let_others_run();
    promptness.start();
    queue.enqueue(item(1));
    while (done == i) std::this_thread::yield();
    promptness.stop();
  }
  queue.close();
}

// It takes Python's lock.
TEST_F(BatchingQueueTest, TimeoutIsNoTurnOfTheInterrupt) {
  BatchingQueue queue(with_timeout(sizes(10, 10), 5));
  std::atomic<int> turns{0};
  const auto start = Clock::now();
  constexpr int kBatches = 20;
  for (int i = 0; i < kBatches; ++i) {
    queue.enqueue(item(1));
    queue.dequeue([&] { ++turns; });
  }
  if (Clock::now() - start < kBatches * kInterruptPeriod) {  // else it is their turn
    EXPECT_LT(turns, kBatches / 2);
  }
}

TEST_F(BatchingQueueTest, TimeoutOfZero) {
  BatchingQueue queue(with_timeout(sizes(10, 10), 0));
  queue.enqueue(item(2));
  EXPECT_EQ(queue.dequeue()->leaf().shape()[1], 2);
}

TEST_F(BatchingQueueTest, FullQueueIsABatch) {
  BatchingQueue queue(with_queue_size(sizes(8, 8), 3));
  for (int i = 0; i < 3; ++i) queue.enqueue(item(2));
  EXPECT_EQ(queue.dequeue()->leaf().shape()[1], 6);
}

// Blocking

TEST_F(BatchingQueueTest, BlockedProducersGoOnAsRoomComes) {
  BatchingQueue queue(with_queue_size(sizes(1, 2), 2));
  Waiting waiting[3];
  Threads threads;
  queue.enqueue(item(1));
  queue.enqueue(item(1));
  for (int i = 0; i < 3; ++i) {
    threads.start([&, i] { queue.enqueue(item(1), waiting[i].interrupt()); });
  }
  for (Waiting& each : waiting) each.wait();
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_EQ(queue.dequeue()->leaf().shape()[1], 2);
  wait_for_size(queue, 2);
  EXPECT_EQ(queue.dequeue()->leaf().shape()[1], 2);
  wait_for_size(queue, 1);
  threads.join();
  EXPECT_GT(queue.stats().producer_wait_seconds, 0.2);
}

TEST_F(BatchingQueueTest, RoomForTwoWakesTwo) {
  BatchingQueue queue(with_queue_size(sizes(1, 2), 2));
  Promptness promptness;
  for (int round = 0; round < 20; ++round) {
    queue.enqueue(item(1));
    queue.enqueue(item(1));
    Threads threads;
    for (int i = 0; i < 2; ++i) threads.start([&] { queue.enqueue(item(1)); });
    let_others_run();
    promptness.start();
    queue.dequeue();
    threads.join();
    promptness.stop();
    queue.dequeue();
  }
}

TEST_F(BatchingQueueTest, ConsumersPassTheWakeUpOn) {
  // Two waiting consumers, and two batches by one item: each takes one, and then none
  // until the other has done so, too.
  BatchingQueue queue(sizes(4, 4));
  std::atomic<int> taken{0};
  Threads threads;
  for (int i = 0; i < 2; ++i) {
    threads.start([&] {
      for (int round = 1; queue.dequeue(); ++round) {
        ++taken;
        while (taken < 2 * round) std::this_thread::yield();
      }
    });
  }
  Promptness promptness;
  for (int round = 1; round <= 20; ++round) {
    let_others_run();
    promptness.start();
    queue.enqueue(item(3));  // incomplete
    queue.enqueue(
        item(4));  // completes it, as what does not fit, and is complete itself
    while (taken < 2 * round) std::this_thread::yield();
    promptness.stop();
  }
  queue.close();
}

TEST_F(BatchingQueueTest, PingPongIsPrompt) {
  BatchingQueue there(sizes(1, 1)), back(sizes(1, 1));
  Threads threads;
  threads.start([&] {
    while (auto batch = there.dequeue()) back.enqueue(*std::move(batch));
  });
  Promptness promptness;
  for (int i = 0; i < 20; ++i) {
    let_others_run();
    promptness.start();
    there.enqueue(item(1, i));
    EXPECT_EQ(values_of(back.dequeue()->leaf())[0], i);
    promptness.stop();
  }
  there.close();
}

TEST_F(BatchingQueueTest, RoomIsPassedOnByWhoLeaves) {
  // All blocked producers but one bring what can't be joined, once there is room.
  BatchingQueue queue(with_queue_size(sizes(1, 1), 2));
  Promptness promptness;
  for (int round = 0; round < 20; ++round) {
    queue.enqueue(item(1));
    queue.enqueue(item(1));
    Threads threads;
    for (int i = 0; i < 4; ++i) {
      threads.start([&] {
        EXPECT_THROW(queue.enqueue(numbered({2, 1})), std::invalid_argument);
      });
    }
    let_others_run();
    std::atomic<bool> done{false};
    threads.start([&] {
      queue.enqueue(item(1));
      done = true;
    });
    let_others_run();
    promptness.start();
    queue.dequeue();
    while (!done) std::this_thread::yield();
    promptness.stop();
    queue.dequeue();  // for those that are still blocked
    threads.join();
    queue.dequeue();
  }
}

// Closing

TEST_F(BatchingQueueTest, Close) {
  BatchingQueue queue(sizes(1, 5));
  queue.enqueue(item(1));
  EXPECT_FALSE(queue.is_closed());
  EXPECT_TRUE(queue.close());
  EXPECT_TRUE(queue.is_closed());
  EXPECT_FALSE(queue.close());
  EXPECT_EQ(queue.size(), 0u);
  EXPECT_FALSE(queue.dequeue());
  EXPECT_THROW(queue.enqueue(item(1)), ClosedBatchingQueue);
}

TEST_F(BatchingQueueTest, CloseWakesEverybody) {
  BatchingQueue queue(with_queue_size(sizes(1, 5), 1));
  BatchingQueue empty(sizes(1, 5));
  queue.enqueue(item(1));
  Waiting waiting[4];
  Threads threads;
  for (int i = 0; i < 4; ++i) {
    threads.start([&, i] {
      if (i < 2) {
        EXPECT_THROW(queue.enqueue(item(1), waiting[i].interrupt()),
                     ClosedBatchingQueue);
      } else {
        EXPECT_FALSE(empty.dequeue(waiting[i].interrupt()));
      }
    });
  }
  for (Waiting& each : waiting) each.wait();
  queue.close();
  empty.close();
}

TEST_F(BatchingQueueTest, CloseIsPrompt) {
  Promptness promptness;
  for (int round = 0; round < 20; ++round) {
    BatchingQueue queue(with_queue_size(sizes(1, 1), 1)), empty(sizes(1, 1));
    queue.enqueue(item(1));
    Threads threads;
    threads.start([&] { EXPECT_THROW(queue.enqueue(item(1)), ClosedBatchingQueue); });
    threads.start([&] { EXPECT_FALSE(empty.dequeue()); });
    let_others_run();
    promptness.start();
    queue.close();
    empty.close();
    threads.join();
    promptness.stop();
  }
}

// Faulty items

struct Faulty {
  ArrayNest nest;
  std::vector<std::string> says;
};

// Items that do not fit behind [{"frame": int32 [2, 3, 7], "reward": int32 [2, 3]}],
// batches of at most 4.
ArrayNest good_item() {
  return Vector{Map{{"frame", numbered({2, 3, 7})}, {"reward", numbered({2, 3})}}};
}

std::vector<Faulty> faulty_items() {
  const auto with = [](ArrayNest frame, ArrayNest reward) -> ArrayNest {
    return Vector{Map{{"frame", std::move(frame)}, {"reward", std::move(reward)}}};
  };
  const Array frame = numbered({2, 1, 7});
  const Array bytes({DType::kUint8, {2, 1}}, nullptr, nullptr);
  return {
      {Vector{}, {"without any array", "a vector of 0"}},
      {Map{{"a", Vector{}}}, {"without any array"}},
      {with(frame, numbered({2})),
       {"at [0][\"reward\"]: int32 [2]", "1 dimension,", "at least 2"}},
      {Array(), {"at the root: uint8 []", "0 dimensions"}},
      {with(frame, numbered({2, 2})),
       {"at [0][\"reward\"]: int32 [2, 2] has 2 entries along dimension 1",
        "first array has 1"}},
      {with(numbered({2, 0, 7}), numbered({2, 0})),
       {"at [0][\"frame\"]: int32 [2, 0, 7] has 0 entries", "at least 1"}},
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

TEST_F(BatchingQueueTest, RefusesFaultyItems) {
  BatchingQueue queue(sizes(1, 4));
  queue.enqueue(good_item());
  for (const Faulty& faulty : faulty_items()) {
    const std::string error =
        error_of<std::invalid_argument>([&] { queue.enqueue(faulty.nest); });
    for (const std::string& text : faulty.says) EXPECT_TRUE(contains(error, text));
    EXPECT_EQ(queue.size(), 1u);
  }
  EXPECT_EQ(queue.dequeue()->num_leaves(), 2u);
}

TEST_F(BatchingQueueTest, FindsFaultyItemsLater) {
  BatchingQueue queue(unchecked(with_timeout(sizes(4, 4), 0)));
  for (const Faulty& faulty : faulty_items()) {
    queue.enqueue(good_item());
    EXPECT_NO_THROW(queue.enqueue(faulty.nest));
    // Together in a batch, or, where the faulty one is too wide for that, one by one.
    std::string errors;
    while (queue.size() > 0) {
      errors += error_of<std::invalid_argument>([&] { queue.dequeue(); });
    }
    for (const std::string& text : faulty.says) EXPECT_TRUE(contains(errors, text));
  }
  queue.enqueue(good_item());
  EXPECT_EQ(queue.dequeue()->num_leaves(), 2u);
}

TEST_F(BatchingQueueTest, ItemsNeedOnlyFitThoseWaiting) {
  BatchingQueue queue(sizes(1, 4));
  queue.enqueue(numbered({2, 1}));
  queue.dequeue();
  EXPECT_NO_THROW(queue.enqueue(numbered({3, 2, 5})));
}

// Interrupts

TEST_F(BatchingQueueTest, InterruptEndsWaits) {
  BatchingQueue queue(with_queue_size(sizes(2, 2), 2));
  Waiting consumer;
  consumer.stop();
  EXPECT_THROW(queue.dequeue(consumer.interrupt()), std::domain_error);
  queue.enqueue(item(1));
  queue.enqueue(item(1));
  Waiting producer;
  producer.stop();
  EXPECT_THROW(queue.enqueue(item(1), producer.interrupt()), std::domain_error);
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_EQ(queue.dequeue()->leaf().shape()[1], 2);
}

TEST_F(BatchingQueueTest, InterruptRunsWithoutTheLock) {
  BatchingQueue queue(sizes(1, 1));
  EXPECT_THROW(queue.dequeue([&] {
    queue.size();
    queue.enqueue(item(1));
    throw std::domain_error("interrupted");
  }),
               std::domain_error);
  EXPECT_EQ(queue.size(), 1u);
}

TEST_F(BatchingQueueTest, InterruptedConsumerPassesTheWakeUpOn) {
  // The interrupted consumer is the only one that the queue knows to be idle when the
  // items come, and leaves; another must take them at once.
  BatchingQueue queue(sizes(1, 1));
  Waiting other;
  std::atomic<bool> taken{false};
  std::atomic<bool> fast{true};
  Threads threads;
  threads.start([&] {
    EXPECT_THROW(queue.dequeue([&] {
      other.wait();
      // While this one is in here, the other waits in the queue.
      queue.enqueue(item(1));
      throw std::domain_error("interrupted");
    }),
                 std::domain_error);
    const auto start = Clock::now();
    while (!taken) std::this_thread::yield();
    fast = Clock::now() - start < seconds(5);
  });
  EXPECT_TRUE(queue.dequeue(other.interrupt()));
  taken = true;
  threads.join();
  EXPECT_TRUE(fast);
}

// Arrays end outside of locks

TEST_F(BatchingQueueTest, NoArrayEndsUnderTheLock) {
  std::atomic<int> ended{0};
  BatchingQueue queue(with_queue_size(sizes(1, 2), 3));
  queue.enqueue(asking_item(queue, ended));
  queue.enqueue(asking_item(queue, ended));
  queue.dequeue();  // joined and let go
  EXPECT_EQ(ended, 2);
  queue.enqueue(asking_item(queue, ended));
  EXPECT_THROW(queue.enqueue(Vector{asking_item(queue, ended)}), std::invalid_argument);
  EXPECT_EQ(ended, 3);
  queue.enqueue(asking_item(queue, ended));
  queue.enqueue(asking_item(queue, ended));
  Waiting waiting;
  waiting.stop();
  EXPECT_THROW(queue.enqueue(asking_item(queue, ended), waiting.interrupt()),
               std::domain_error);
  EXPECT_EQ(ended, 4);
  queue.close();
  EXPECT_EQ(ended, 7);
  EXPECT_THROW(queue.enqueue(asking_item(queue, ended)), ClosedBatchingQueue);
  EXPECT_EQ(ended, 8);
}

TEST_F(DynamicBatcherTest, NoArrayEndsUnderTheLock) {
  std::atomic<int> ended{0};
  DynamicBatcher batcher(sizes(2, 2));
  {
    Waiting waiting;
    waiting.stop();
    EXPECT_THROW(batcher.compute(asking_item(batcher, ended), waiting.interrupt()),
                 std::domain_error);
    EXPECT_EQ(ended, 1);
    EXPECT_EQ(batcher.size(), 0u);
  }
  auto first = async_compute(batcher, asking_item(batcher, ended));
  auto second = async_compute(batcher, asking_item(batcher, ended));
  batcher.next()->set_outputs(asking_item(batcher, ended).map([](const Array& array) {
    return concatenate({array, array}, 1, *std::make_unique<MemoryPool>());
  }));
  first.get();
  second.get();
  EXPECT_EQ(ended, 4);
  auto third = async_compute(batcher, asking_item(batcher, ended));
  wait_for_size(batcher, 1);
  batcher.close();
  EXPECT_THROW(third.get(), ClosedBatchingQueue);
  EXPECT_EQ(ended, 5);
}

// Stats

TEST_F(BatchingQueueTest, Stats) {
  BatchingQueue queue(sizes(1, 5));
  queue.enqueue(item(2));
  queue.enqueue(item(3));
  queue.enqueue(item(4));
  queue.dequeue();
  BatchingStats stats = queue.stats();
  EXPECT_EQ(stats.num_batches, 1u);
  EXPECT_EQ(stats.num_items, 2u);
  EXPECT_EQ(stats.num_entries, 5u);
  EXPECT_EQ(stats.bytes_copied, 2u * 5 * 3 * 4);
  EXPECT_GE(stats.pool_bytes, stats.bytes_copied);
  EXPECT_EQ(stats.producer_wait_seconds, 0);
  EXPECT_EQ(stats.consumer_wait_seconds, 0);
  queue.dequeue();
  stats = queue.stats();
  EXPECT_EQ(stats.num_batches, 2u);
  EXPECT_EQ(stats.num_items, 3u);
  EXPECT_EQ(stats.num_entries, 9u);
  EXPECT_EQ(stats.bytes_copied, 2u * 5 * 3 * 4);
  Waiting waiting;
  waiting.stop();
  EXPECT_THROW(queue.dequeue(waiting.interrupt()), std::domain_error);
  EXPECT_GE(queue.stats().consumer_wait_seconds, 0.09);
}

TEST_F(DynamicBatcherTest, Stats) {
  DynamicBatcher batcher(sizes(5, 5));
  auto first = async_compute(batcher, item(2));
  auto second = async_compute(batcher, item(3));
  batcher.next()->set_outputs(numbered({1, 5}));
  first.get();
  second.get();
  const BatchingStats stats = batcher.stats();
  EXPECT_EQ(stats.num_batches, 1u);
  EXPECT_EQ(stats.num_items, 2u);
  EXPECT_EQ(stats.num_entries, 5u);
  EXPECT_EQ(stats.bytes_copied, 2u * 5 * 3 * 4 + 5 * 4);
  EXPECT_GT(stats.producer_wait_seconds, 0);
}

// Answers

TEST_F(DynamicBatcherTest, EveryCallerGetsItsPart) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    const size_t dim = random() % 3;
    BatchingOptions options = sizes(9, 9);
    options.batch_dim = dim;
    DynamicBatcher batcher(options);
    std::vector<int64_t> widths{4, 2, 3};
    std::shuffle(widths.begin(), widths.end(), random);
    std::vector<std::future<ArrayNest>> answers;
    for (size_t i = 0; i < widths.size(); ++i) {
      Shape shape{1, 1, 1};
      shape[dim] = widths[i];
      answers.push_back(async_compute(
          batcher,
          ArrayNest(Map{{"x", numbered(shape, static_cast<int32_t>(100 * i))}})));
      wait_for_size(batcher, i + 1);
    }
    const auto batch = batcher.next();
    ASSERT_EQ(batch->size(), 9);
    EXPECT_EQ(batch->inputs().dict().at("x").leaf().shape()[dim], 9);
    Shape wide{5, 3, 7}, flat{2, 4, 6};
    wide[dim] = flat[dim] = 9;
    const Array action = numbered(wide), baseline = numbered(flat, -500);
    batch->set_outputs(Vector{Vector{action, baseline}, Vector{}});
    int64_t begin = 0;
    for (size_t i = 0; i < widths.size(); ++i) {
      const ArrayNest answer = answers[i].get();
      const int64_t end = begin + widths[i];
      ASSERT_EQ(answer.vector().size(), 2u);
      expect_same(answer.vector()[0].vector()[0].leaf(),
                  naive_slice(action, dim, begin, end));
      expect_same(answer.vector()[0].vector()[1].leaf(),
                  naive_slice(baseline, dim, begin, end));
      begin = end;
    }
  }
}

TEST_F(DynamicBatcherTest, AnswersHaveMemoryOfTheirOwn) {
  DynamicBatcher batcher(sizes(1, 9));
  const ArrayNest inputs = item(2);
  auto answer = async_compute(batcher, inputs);
  const auto batch = batcher.next();
  EXPECT_EQ(batch->inputs().leaf().data(), inputs.leaf().data());
  const Array outputs = numbered({1, 2}, 7);
  batch->set_outputs(outputs);
  EXPECT_EQ(outputs.owner().use_count(), 1);  // `outputs` itself
  std::memset(outputs.data(), 0, outputs.num_bytes());
  EXPECT_EQ(values_of(answer.get().leaf()), (Values{7, 8}));
}

TEST_F(DynamicBatcherTest, RefusesWrongOutputsAndWaitsForBetterOnes) {
  DynamicBatcher batcher(sizes(1, 9));
  auto answer = async_compute(batcher, item(3));
  const auto batch = batcher.next();
  const auto refusal = [&](const ArrayNest& outputs) {
    return error_of<std::invalid_argument>([&] { batch->set_outputs(outputs); });
  };
  const Array good = numbered({1, 3});
  EXPECT_TRUE(contains(refusal(Map{{"a", Vector{good, numbered({1, 4})}}}),
                       "at [\"a\"][1]: int32 [1, 4] has 4 entries along dimension 1"));
  EXPECT_TRUE(contains(refusal(Map{{"a", Vector{good, numbered({1, 4})}}}), "has 3"));
  EXPECT_TRUE(contains(refusal(Map{{"a", good}, {"b", numbered({1, 2, 3})}}),
                       "at [\"b\"]: int32 [1, 2, 3] has 2 entries along dimension 1"));
  EXPECT_TRUE(contains(refusal(Vector{good, numbered({3})}),
                       "at [1]: int32 [3] has 1 dimension"));
  EXPECT_TRUE(contains(refusal(Map{{"a", Vector{}}}), "without any array"));
  batch->set_outputs(good);
  EXPECT_EQ(values_of(answer.get().leaf()), (Values{0, 1, 2}));
}

TEST_F(DynamicBatcherTest, UncheckedOutputsMayBePadded) {
  DynamicBatcher batcher(unchecked(sizes(1, 9)));
  auto answer = async_compute(batcher, item(3));
  const auto batch = batcher.next();
  EXPECT_THROW(batch->set_outputs(numbered({1, 2})), std::invalid_argument);
  batch->set_outputs(numbered({2, 8}));
  EXPECT_EQ(values_of(answer.get().leaf()), (Values{0, 1, 2, 8, 9, 10}));
}

TEST_F(DynamicBatcherTest, OneAnswerOnly) {
  const std::string before = "the batch was answered before";
  DynamicBatcher batcher(sizes(1, 9));
  auto answer = async_compute(batcher, item(1));
  auto batch = batcher.next();
  batch->set_outputs(numbered({1, 1}, 5));
  EXPECT_TRUE(contains(error_of<std::runtime_error>([&] {
                         batch->set_outputs(numbered({1, 1}));
                       }),
                       before));
  EXPECT_TRUE(contains(error_of<std::runtime_error>([&] { batch->set_error("late"); }),
                       before));
  EXPECT_EQ(values_of(answer.get().leaf()), (Values{5}));

  answer = async_compute(batcher, item(1));
  batch = batcher.next();
  batch->set_error("out of memory");
  EXPECT_TRUE(contains(error_of<std::runtime_error>([&] {
                         batch->set_outputs(numbered({1, 1}));
                       }),
                       before));
  EXPECT_EQ(error_of<AsyncError>([&] { answer.get(); }), "out of memory");
}

TEST_F(DynamicBatcherTest, DroppedBatch) {
  DynamicBatcher batcher(sizes(3, 9));
  auto first = async_compute(batcher, item(1));
  auto second = async_compute(batcher, item(2));
  batcher.next();
  EXPECT_TRUE(contains(error_of<AsyncError>([&] { first.get(); }), "dropped"));
  EXPECT_THROW(second.get(), AsyncError);
}

TEST_F(DynamicBatcherTest, RefusesFaultyItems) {
  DynamicBatcher batcher(with_timeout(sizes(4, 4), 60000));
  auto waiting = async_compute(batcher, good_item());
  wait_for_size(batcher, 1);
  for (const Faulty& faulty : faulty_items()) {
    const std::string error =
        error_of<std::invalid_argument>([&] { batcher.compute(faulty.nest); });
    for (const std::string& text : faulty.says) EXPECT_TRUE(contains(error, text));
  }
  EXPECT_EQ(batcher.size(), 1u);
  batcher.close();
  EXPECT_THROW(waiting.get(), ClosedBatchingQueue);
}

TEST_F(DynamicBatcherTest, FaultyBatchFailsItsCallersOnly) {
  DynamicBatcher batcher(unchecked(sizes(2, 2)));
  auto first = async_compute(batcher, item(1));
  wait_for_size(batcher, 1);
  auto second = async_compute(batcher, numbered({2, 1}));
  wait_for_size(batcher, 2);
  auto third = async_compute(batcher, item(2));
  wait_for_size(batcher, 3);
  const auto batch = batcher.next();  // the third's
  ASSERT_TRUE(batch);
  EXPECT_TRUE(contains(error_of<AsyncError>([&] { first.get(); }),
                       "at the root: int32 [2, 1] cannot be joined"));
  EXPECT_THROW(second.get(), AsyncError);
  batch->set_outputs(numbered({1, 2}));
  EXPECT_EQ(values_of(third.get().leaf()), (Values{0, 1}));
}

TEST_F(DynamicBatcherTest, AllocatorErrorComesThrough) {
  BatchingOptions options = sizes(1, 2);
  options.allocator = [](size_t) -> MemoryPool::Block {
    throw std::domain_error("no pinned memory");
  };
  DynamicBatcher batcher(options);
  auto answer = async_compute(batcher, item(1));
  EXPECT_EQ(error_of<std::domain_error>([&] { batcher.next(); }), "no pinned memory");
  EXPECT_EQ(error_of<AsyncError>([&] { answer.get(); }), "no pinned memory");
}

TEST_F(DynamicBatcherTest, TimeoutHandsOutAPartialBatch) {
  DynamicBatcher batcher(with_timeout(sizes(8, 8), 30));
  const auto start = Clock::now();
  auto answer = async_compute(batcher, item(3));
  const auto batch = batcher.next();
  EXPECT_GE(Clock::now() - start, Milliseconds(30));
  EXPECT_EQ(batch->size(), 3);
  batch->set_outputs(numbered({1, 3}));
  answer.get();
}

TEST_F(DynamicBatcherTest, PingPongIsPrompt) {
  DynamicBatcher batcher(sizes(1, 1));
  Threads threads;
  threads.start([&] {
    while (auto batch = batcher.next()) batch->set_outputs(batch->inputs());
  });
  Promptness promptness;
  for (int i = 0; i < 20; ++i) {
    let_others_run();
    promptness.start();
    EXPECT_EQ(values_of(batcher.compute(item(1, i)).leaf())[0], i);
    promptness.stop();
  }
  batcher.close();
}

// Endings

TEST_F(DynamicBatcherTest, Close) {
  DynamicBatcher batcher(sizes(1, 9));
  EXPECT_FALSE(batcher.is_closed());
  EXPECT_TRUE(batcher.close());
  EXPECT_FALSE(batcher.close());
  EXPECT_TRUE(batcher.is_closed());
  EXPECT_EQ(batcher.next(), nullptr);
  EXPECT_THROW(batcher.compute(item(1)), ClosedBatchingQueue);
}

TEST_F(DynamicBatcherTest, CloseEndsCallersWhereverTheirItemsAre) {
  DynamicBatcher batcher(sizes(2, 2));
  auto taken = async_compute(batcher, item(2));
  const auto batch = batcher.next();
  auto waiting = async_compute(batcher, item(1));
  wait_for_size(batcher, 1);
  auto consumer = std::async(std::launch::async, [&] { return batcher.next(); });
  batcher.close();
  EXPECT_THROW(taken.get(), ClosedBatchingQueue);  // its batch still unanswered
  EXPECT_THROW(waiting.get(), ClosedBatchingQueue);
  EXPECT_EQ(consumer.get(), nullptr);
  EXPECT_EQ(batch->size(), 2);
  EXPECT_NO_THROW(batch->set_outputs(numbered({1, 1})));  // nobody is waiting
}

TEST_F(DynamicBatcherTest, BatchesOutliveTheirBatcher) {
  std::shared_ptr<DynamicBatcher::Batch> answered, dropped;
  {
    DynamicBatcher batcher(sizes(2, 2));
    auto first = async_compute(batcher, item(2));
    answered = batcher.next();
    auto second = async_compute(batcher, item(2, 100));
    dropped = batcher.next();
    batcher.close();
    EXPECT_THROW(first.get(), ClosedBatchingQueue);
    EXPECT_THROW(second.get(), ClosedBatchingQueue);
  }
  EXPECT_EQ(values_of(answered->inputs().leaf())[11], 11);
  answered->set_outputs(numbered({1, 2}));
  dropped.reset();
}

TEST_F(DynamicBatcherTest, InterruptWithdrawsTheItem) {
  auto fastest = Clock::duration::max();
  for (int round = 0; round < 3; ++round) {
    DynamicBatcher batcher(with_queue_size(sizes(5, 5), 2));
    Waiting left;
    auto first = async_compute(batcher, item(1, 0));
    wait_for_size(batcher, 1);
    auto second = async_compute(batcher, item(2, 100), left.interrupt());
    // The queue is full, so that this would be a batch: nobody takes it.
    wait_for_size(batcher, 2);
    auto third = async_compute(batcher, item(4, 200));
    let_others_run();
    left.stop();
    EXPECT_THROW(second.get(), std::domain_error);
    const auto start = Clock::now();
    wait_for_size(batcher, 2);  // the third came in
    fastest = std::min(fastest, Clock::now() - start);
    const auto batch = batcher.next();
    EXPECT_EQ(batch->size(), 5);
    batch->set_outputs(numbered({1, 5}));
    EXPECT_EQ(values_of(first.get().leaf()), (Values{0}));
    EXPECT_EQ(values_of(third.get().leaf()), (Values{1, 2, 3, 4}));
  }
  EXPECT_LT(fastest, kLookPeriod / 2);
}

TEST_F(DynamicBatcherTest, AnswerForOneWhoLeft) {
  DynamicBatcher batcher(sizes(3, 3));
  Waiting left;
  auto first = async_compute(batcher, item(1), left.interrupt());
  wait_for_size(batcher, 1);
  auto second = async_compute(batcher, item(2));
  const auto batch = batcher.next();
  left.stop();
  EXPECT_THROW(first.get(), std::domain_error);
  batch->set_outputs(numbered({1, 3}));
  EXPECT_EQ(values_of(second.get().leaf()), (Values{1, 2}));
}

}  // namespace
}  // namespace torchbeast
