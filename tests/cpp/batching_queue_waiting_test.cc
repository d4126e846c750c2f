// Threads that wait in BatchingQueue: what wakes them, and what ends their calls.

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <stdexcept>

#include "batching.h"
#include "batching_test_util.h"

namespace torchbeast {
namespace {

using std::chrono::seconds;

class BatchingQueueWaitingTest : public GuardedTest {};

TEST_F(BatchingQueueWaitingTest, BlockedProducersGoOnAsRoomComes) {
  BatchingQueue queue(with_queue_size(batch_sizes(1, 2), 2));
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
}

TEST_F(BatchingQueueWaitingTest, RoomForTwoWakesTwo) {
  BatchingQueue queue(with_queue_size(batch_sizes(1, 2), 2));
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

TEST_F(BatchingQueueWaitingTest, ConsumersPassTheWakeUpOn) {
  // Two waiting consumers, and two batches by one item: each takes one, and then none
  // until the other has done so, too.
  BatchingQueue queue(batch_sizes(4, 4));
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

TEST_F(BatchingQueueWaitingTest, PingPongIsPrompt) {
  BatchingQueue there(batch_sizes(1, 1)), back(batch_sizes(1, 1));
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

// Closing

TEST_F(BatchingQueueWaitingTest, Close) {
  BatchingQueue queue(batch_sizes(1, 5));
  queue.enqueue(item(1));
  EXPECT_FALSE(queue.is_closed());
  EXPECT_TRUE(queue.close());
  EXPECT_TRUE(queue.is_closed());
  EXPECT_FALSE(queue.close());
  EXPECT_EQ(queue.size(), 0u);
  EXPECT_FALSE(queue.dequeue());
  EXPECT_THROW(queue.enqueue(item(1)), ClosedBatchingQueue);
}

TEST_F(BatchingQueueWaitingTest, CloseWakesEverybody) {
  BatchingQueue queue(with_queue_size(batch_sizes(1, 5), 1));
  BatchingQueue empty(batch_sizes(1, 5));
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

TEST_F(BatchingQueueWaitingTest, CloseIsPrompt) {
  Promptness promptness;
  for (int round = 0; round < 20; ++round) {
    BatchingQueue queue(with_queue_size(batch_sizes(1, 1), 1)),
        empty(batch_sizes(1, 1));
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

// Interrupts

TEST_F(BatchingQueueWaitingTest, InterruptEndsWaits) {
  BatchingQueue queue(with_queue_size(batch_sizes(2, 2), 2));
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

TEST_F(BatchingQueueWaitingTest, InterruptRunsWithoutTheLock) {
  BatchingQueue queue(batch_sizes(1, 1));
  EXPECT_THROW(queue.dequeue([&] {
    queue.size();
    queue.enqueue(item(1));
    throw std::domain_error("interrupted");
  }),
               std::domain_error);
  EXPECT_EQ(queue.size(), 1u);
}

TEST_F(BatchingQueueWaitingTest, InterruptedConsumerPassesTheWakeUpOn) {
  // The interrupted consumer is the only one that the queue knows to be idle when the
  // items come, and leaves; another must take them at once.
  BatchingQueue queue(batch_sizes(1, 1));
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

TEST_F(BatchingQueueWaitingTest, NoArrayEndsUnderTheLock) {
  std::atomic<int> ended{0};
  BatchingQueue queue(with_queue_size(batch_sizes(1, 2), 3));
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

}  // namespace
}  // namespace torchbeast
