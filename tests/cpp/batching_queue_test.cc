// What BatchingQueue makes of its items: joined batches, complete by size, time or a
// full queue, and refusals of faulty items.

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "batching.h"
#include "batching_test_util.h"

namespace torchbeast {
namespace {

using std::chrono::seconds;

class BatchingQueueTest : public GuardedTest {};

TEST_F(BatchingQueueTest, RefusesSizesWithoutSense) {
  const auto refusal = [](BatchingOptions options) {
    return error_of<std::invalid_argument>([&] { BatchingQueue queue(options); });
  };
  EXPECT_EQ(refusal(batch_sizes(0, 5)), "minimum_batch_size must be at least 1, not 0");
  EXPECT_EQ(refusal(batch_sizes(-3, 5)),
            "minimum_batch_size must be at least 1, not -3");
  EXPECT_EQ(
      refusal(batch_sizes(5, 4)),
      "maximum_batch_size must be at least minimum_batch_size, which is 5, not 4");
  EXPECT_EQ(refusal(with_timeout(batch_sizes(1, 5), -1)),
            "timeout must be at least 0 ms, not -1 ms");
  EXPECT_EQ(refusal(with_queue_size(batch_sizes(1, 5), 0)),
            "maximum_queue_size must be at least 1, not 0");
  BatchingOptions far_dim;
  far_dim.batch_dim = 8;
  EXPECT_EQ(refusal(far_dim), "batch_dim must be less than 8, not 8");
  EXPECT_EQ(refusal(with_queue_size(with_timeout(batch_sizes(5, 5), 0), 1)), "nothing");
}

TEST_F(BatchingQueueTest, EndlessTimeoutIsATime) {
  BatchingQueue queue(
      with_timeout(batch_sizes(2, 2), std::numeric_limits<int64_t>::max()));
  queue.enqueue(item(1));
  auto batch = std::async(std::launch::async, [&] { return queue.dequeue(); });
  queue.enqueue(item(1));
  EXPECT_TRUE(batch.get());
}

// Joining

TEST_F(BatchingQueueTest, JoinsAlongEveryBatchDim) {
  for (size_t dim = 0; dim < 3; ++dim) {
    BatchingOptions options = batch_sizes(1, 100);
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

TEST_F(BatchingQueueTest, SingleItemIsNotCopied) {
  BatchingQueue queue(batch_sizes(1, 100));
  const ArrayNest one = item(4);
  queue.enqueue(one);
  EXPECT_EQ(queue.dequeue()->leaf().data(), one.leaf().data());
  EXPECT_EQ(queue.stats().bytes_copied, 0u);
}

// When a batch is complete

TEST_F(BatchingQueueTest, MinimumCountsEntries) {
  BatchingQueue queue(batch_sizes(5, 100));
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
  BatchingQueue queue(batch_sizes(3, 4));
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
  BatchingQueue queue(batch_sizes(5, 5));
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
  BatchingQueue queue(batch_sizes(1, 2));
  for (int32_t i = 0; i < 5; ++i) queue.enqueue(item(1, 100 * i));
  EXPECT_EQ(values_of(queue.dequeue()->leaf()),
            (Values{0, 1, 2, 100, 101, 102, 3, 4, 5, 103, 104, 105}));
  EXPECT_EQ(values_of(queue.dequeue()->leaf())[0], 200);
  EXPECT_EQ(values_of(queue.dequeue()->leaf()), (Values{400, 401, 402, 403, 404, 405}));
}

TEST_F(BatchingQueueTest, TimeoutHandsOutAPartialBatch) {
  BatchingQueue queue(with_timeout(batch_sizes(10, 10), 40));
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
  BatchingQueue queue(with_timeout(batch_sizes(10, 10), 5));
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
  BatchingQueue queue(with_timeout(batch_sizes(10, 10), 5));
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

TEST_F(BatchingQueueTest, FullQueueIsABatch) {
  BatchingQueue queue(with_queue_size(batch_sizes(8, 8), 3));
  for (int i = 0; i < 3; ++i) queue.enqueue(item(2));
  EXPECT_EQ(queue.dequeue()->leaf().shape()[1], 6);
}

// Faulty items

TEST_F(BatchingQueueTest, RefusesFaultyItems) {
  BatchingQueue queue(batch_sizes(1, 4));
  queue.enqueue(good_item());
  for (const Faulty& faulty : faulty_items()) {
    const std::string error =
        error_of<std::invalid_argument>([&] { queue.enqueue(faulty.nest); });
    for (const std::string& text : faulty.says) EXPECT_TRUE(contains(error, text));
    EXPECT_EQ(queue.size(), 1u);
  }
  EXPECT_EQ(queue.dequeue()->num_leaves(), 2u);
}

// A queue with room for one item, in batches of one.
BatchingOptions room_for_one() {
  BatchingOptions options = batch_sizes(1, 1);
  options.maximum_queue_size = 1;
  return options;
}

TEST_F(BatchingQueueTest, OfferNeverWaitsAndTellsOfRoom) {
  BatchingQueue queue(room_for_one());
  using Texts = std::vector<std::string>;
  Texts told;
  const auto offer = [&](int64_t number) {
    return queue.offer(numbered({1, 1}, number), [&told, number](bool is_open) {
      told.push_back(std::to_string(number) + (is_open ? " has room" : " is too late"));
    });
  };
  EXPECT_TRUE(offer(1));
  EXPECT_FALSE(offer(2));
  EXPECT_FALSE(offer(3));
  EXPECT_EQ(queue.size(), 1u);
  EXPECT_TRUE(told.empty());
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 1));
  EXPECT_EQ(told, Texts{"2 has room"});
  EXPECT_THROW(queue.offer(numbered({1, 3}), nullptr), std::invalid_argument);
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 2));
  EXPECT_FALSE(offer(4));
  queue.close();
  EXPECT_EQ(told, (Texts{"2 has room", "3 has room", "4 is too late"}));
  EXPECT_THROW(offer(5), ClosedBatchingQueue);
  EXPECT_EQ(told.size(), 3u);
}

TEST_F(BatchingQueueTest, ABatchTellsThoseInLineWhomItTakes) {
  BatchingOptions options = batch_sizes(1, 4);
  options.maximum_queue_size = 1;
  BatchingQueue queue(options);
  int num_told = 0;
  for (int64_t i : {0, 1, 2}) {
    const auto tell = [&num_told](bool is_open) { num_told += is_open ? 1 : 100; };
    EXPECT_EQ(queue.offer(numbered({1, 1}, i), tell), i == 0);
  }
  queue.dequeue();
  EXPECT_EQ(num_told, 2);
}

// Neither those who wait nor those who are told push the others back.
TEST_F(BatchingQueueTest, RoomGoesToWhoCameFirst) {
  BatchingQueue queue(room_for_one());
  std::atomic<int> num_told{0};
  const auto tell = [&](bool) { ++num_told; };
  EXPECT_TRUE(queue.offer(numbered({1, 1}, 0), tell));
  EXPECT_FALSE(queue.offer(numbered({1, 1}, 1), tell));
  std::atomic<bool> has_waited{false};
  Interrupt note = [&] { has_waited = true; };
  auto waiting = std::async(std::launch::async, [&] {
    queue.enqueue(numbered({1, 1}, 2), note);
    return num_told.load();
  });
  while (!has_waited) std::this_thread::yield();
  EXPECT_FALSE(queue.offer(numbered({1, 1}, 3), tell));
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 0));
  EXPECT_EQ(num_told, 1);
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 1));
  EXPECT_EQ(waiting.get(), 1);  // before the last one is told
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 2));
  EXPECT_EQ(num_told, 2);
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 3));
}

TEST_F(BatchingQueueTest, WhoLeavesTheLineTakesItsItemAlong) {
  BatchingQueue queue(room_for_one());
  queue.enqueue(numbered({1, 1}, 0));
  const Interrupt leave = [] { throw std::overflow_error("enough"); };
  EXPECT_THROW(queue.enqueue(numbered({1, 1}, 1), leave), std::overflow_error);
  bool has_room = false;
  EXPECT_FALSE(queue.offer(numbered({1, 1}, 2), [&](bool) { has_room = true; }));
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 0));
  EXPECT_TRUE(has_room);
  expect_same(queue.dequeue()->leaf(), numbered({1, 1}, 2));
  EXPECT_EQ(queue.size(), 0u);
}

TEST_F(BatchingQueueTest, ItemsNeedOnlyFitThoseWaiting) {
  BatchingQueue queue(batch_sizes(1, 4));
  queue.enqueue(numbered({2, 1}));
  queue.dequeue();
  EXPECT_NO_THROW(queue.enqueue(numbered({3, 2, 5})));
}

// Stats

TEST_F(BatchingQueueTest, Stats) {
  BatchingQueue queue(batch_sizes(1, 5));
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
  queue.dequeue();
  stats = queue.stats();
  EXPECT_EQ(stats.num_batches, 2u);
  EXPECT_EQ(stats.num_items, 3u);
  EXPECT_EQ(stats.num_entries, 9u);
  EXPECT_EQ(stats.bytes_copied, 2u * 5 * 3 * 4);
}

}  // namespace
}  // namespace torchbeast
