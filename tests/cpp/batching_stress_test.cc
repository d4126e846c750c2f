// Many threads at once.

#include <gtest/gtest.h>

#include <atomic>
#include <iostream>
#include <random>

#include "batching.h"
#include "test_util.h"

namespace torchbeast {
namespace {

class BatchingStressTest : public GuardedTest {};

// [2, width] of which the first row says `id`, and the second which entry it is.
ArrayNest item(int32_t id, int64_t width) {
  std::vector<int32_t> values(static_cast<size_t>(2 * width), id);
  for (int64_t i = 0; i < width; ++i) {
    values[static_cast<size_t>(width + i)] = static_cast<int32_t>(i);
  }
  return make_array({2, width}, values);
}

int64_t width_of(int32_t id) { return 1 + id % 3; }

// Spins for a random while, so that the threads meet at another place each time.
void spin(uint32_t turns) {
  for (std::atomic<uint32_t> i{0}; i < turns; ++i) {
  }
}

// Counts every item of a batch, whose entries must be all there and side by side.
void count_items(const Array& batch, std::vector<std::atomic<int>>& seen) {
  const int64_t size = batch.shape()[1];
  const int32_t* ids = batch.as<int32_t>();
  for (int64_t i = 0; i < size;) {
    const int32_t id = ids[i];
    ++seen.at(static_cast<size_t>(id));
    ASSERT_LE(i + width_of(id), size);
    for (int32_t k = 0; k < width_of(id); ++k, ++i) {
      ASSERT_EQ(ids[i], id);
      ASSERT_EQ(ids[size + i], k);
    }
  }
}

void test_every_item_once(BatchingOptions options) {
  const int num_producers = 64, num_consumers = 16, num_each = scaled(2000);
  std::vector<std::atomic<int>> seen(static_cast<size_t>(num_producers * num_each));
  std::atomic<int64_t> num_entries{0};
  BatchingQueue queue(options);
  Threads producers, consumers;
  for (int i = 0; i < num_consumers; ++i) {
    consumers.start([&] {
      while (auto batch = queue.dequeue()) {
        ASSERT_LE(batch->leaf().shape()[1], options.maximum_batch_size);
        count_items(batch->leaf(), seen);
        num_entries += batch->leaf().shape()[1];
      }
    });
  }
  for (int p = 0; p < num_producers; ++p) {
    producers.start([&, p] {
      for (int i = 0; i < num_each; ++i) {
        const int32_t id = p * num_each + i;
        queue.enqueue(item(id, width_of(id)));
      }
    });
  }
  producers.join();
  int64_t expected = 0;
  for (size_t id = 0; id < seen.size(); ++id) {
    expected += width_of(static_cast<int32_t>(id));
  }
  while (num_entries < expected) std::this_thread::yield();
  queue.close();
  consumers.join();
  EXPECT_EQ(num_entries, expected);
  for (const auto& count : seen) ASSERT_EQ(count, 1);
  EXPECT_EQ(queue.stats().num_items, seen.size());
  EXPECT_EQ(queue.stats().num_entries, static_cast<uint64_t>(expected));
}

TEST_F(BatchingStressTest, EveryItemOnce) { test_every_item_once(batch_sizes(1, 32)); }

TEST_F(BatchingStressTest, EveryItemOnceWithBackPressure) {
  BatchingOptions options = batch_sizes(8, 16);
  options.maximum_queue_size = 5;
  options.timeout = Milliseconds(1);
  test_every_item_once(options);
}

TEST_F(BatchingStressTest, EveryCallerItsAnswer) {
  const int num_callers = 64, num_consumers = 16, num_each = scaled(1000);
  BatchingOptions options = batch_sizes(4, 32);
  options.timeout = Milliseconds(1);
  DynamicBatcher batcher(options);
  std::atomic<int> answered{0};
  Threads callers, consumers;
  for (int i = 0; i < num_consumers; ++i) {
    consumers.start([&] {
      while (auto batch = batcher.next()) {
        const Array& inputs = batch->inputs().leaf();
        std::vector<int32_t> doubled = values_of(inputs);
        for (int32_t& value : doubled) value *= 2;
        batch->set_outputs(make_array(inputs.shape(), doubled));
      }
    });
  }
  for (int c = 0; c < num_callers; ++c) {
    callers.start([&, c] {
      for (int i = 0; i < num_each; ++i) {
        const int32_t id = c * num_each + i;
        const int64_t width = width_of(id);
        const ArrayNest answer = batcher.compute(item(id, width));
        ASSERT_EQ(answer.leaf().shape(), (Shape{2, width}));
        for (int64_t k = 0; k < width; ++k) {
          ASSERT_EQ(answer.leaf().as<int32_t>()[k], 2 * id);
          ASSERT_EQ(answer.leaf().as<int32_t>()[width + k], 2 * k);
        }
        ++answered;
      }
    });
  }
  callers.join();
  batcher.close();
  consumers.join();
  EXPECT_EQ(answered, num_callers * num_each);
  EXPECT_EQ(batcher.stats().num_items, static_cast<uint64_t>(answered));
}

TEST_F(BatchingStressTest, CloseQueueInTheMiddle) {
  std::mt19937 random(1);
  const int num_rounds = scaled(1000);
  for (int round = 0; round < num_rounds; ++round) {
    BatchingOptions options = batch_sizes(1 + round % 3, 4);
    options.maximum_queue_size = round % 2 == 0 ? 2 : 100;
    if (round % 5 == 0) options.timeout = Milliseconds(1);
    BatchingQueue queue(options);
    std::atomic<int64_t> num_in{0}, num_out{0};
    Threads threads;
    for (int32_t p = 0; p < 3; ++p) {
      threads.start([&, p] {
        EXPECT_THROW(
            {
              while (true) {
                queue.enqueue(item(p, 1));
                ++num_in;
              }
            },
            ClosedBatchingQueue);
      });
    }
    for (int i = 0; i < 2; ++i) {
      threads.start([&] {
        while (auto batch = queue.dequeue()) num_out += batch->leaf().shape()[1];
      });
    }
    const uint32_t turns = random() % 30000;
    threads.start([&queue, turns] {
      spin(turns);
      queue.close();
    });
    spin(turns);
    queue.close();
    threads.join();
    EXPECT_EQ(queue.size(), 0u);
    EXPECT_GE(num_in, num_out);
  }
}

TEST_F(BatchingStressTest, CloseBatcherInTheMiddle) {
  std::mt19937 random(2);
  const int num_rounds = scaled(1000);
  for (int round = 0; round < num_rounds; ++round) {
    BatchingOptions options = batch_sizes(1 + round % 3, 4);
    if (round % 2 == 0) options.timeout = Milliseconds(1);
    std::vector<std::shared_ptr<DynamicBatcher::Batch>> kept;  // outlive it unanswered
    Mutex mutex;
    {
      DynamicBatcher batcher(options);
      Threads threads;
      for (int32_t c = 0; c < 3; ++c) {
        threads.start([&, c] {
          while (true) {
            try {
              const ArrayNest answer = batcher.compute(item(c, 1));
              ASSERT_EQ(answer.leaf().as<int32_t>()[0], c);
            } catch (const AsyncError&) {
            } catch (const ClosedBatchingQueue&) {
              return;
            }
          }
        });
      }
      for (int i = 0; i < 2; ++i) {
        threads.start([&, i] {
          for (int n = 0; auto batch = batcher.next(); ++n) {
            if (n % 4 == 1) continue;  // dropped
            if (n % 4 == 2) {
              batch->set_error("not this one");
            } else if (n == 7 + 8 * i) {
              MutexLock lock(mutex);
              kept.push_back(std::move(batch));
            } else {
              batch->set_outputs(batch->inputs());
            }
          }
        });
      }
      spin(random() % 200000);
      batcher.close();
      threads.join();
    }
    MutexLock lock(mutex);
    for (const auto& batch : kept) {
      if (round % 2 == 0) batch->set_outputs(batch->inputs());
    }
  }
}

TEST_F(BatchingStressTest, DroppedBatches) {
  const int num_callers = 16, num_each = scaled(1000);
  DynamicBatcher batcher(batch_sizes(1, 8));
  std::atomic<uint64_t> num_answered{0}, num_failed{0}, items_answered{0};
  Threads callers, consumers;
  for (uint32_t i = 0; i < 4; ++i) {
    consumers.start([&, i] {
      std::mt19937 random(i);
      while (auto batch = batcher.next()) {
        if (random() % 2 == 0) continue;
        items_answered += static_cast<uint64_t>(batch->size());
        batch->set_outputs(batch->inputs());
      }
    });
  }
  for (int c = 0; c < num_callers; ++c) {
    callers.start([&, c] {
      for (int i = 0; i < num_each; ++i) {
        try {
          ASSERT_EQ(batcher.compute(item(c, 1)).leaf().as<int32_t>()[0], c);
          ++num_answered;
        } catch (const AsyncError&) {
          ++num_failed;
        }
      }
    });
  }
  callers.join();
  batcher.close();
  consumers.join();
  EXPECT_EQ(num_answered, items_answered);
  EXPECT_EQ(num_answered + num_failed, static_cast<uint64_t>(num_callers * num_each));
}

TEST_F(BatchingStressTest, MemoryIsFlat) {
  // Observations 84 x 84 from 4 callers, of 1 to 3 entries; every now and then a batch
  // is dropped or a nest faulty.
  const int num_callers = 4, num_each = scaled(250000);
  BatchingOptions options = batch_sizes(1, 8);
  DynamicBatcher batcher(options);
  const auto actions = std::make_shared<std::vector<int32_t>>(1000, 3);
  std::atomic<int> num_steps{0};
  std::atomic<size_t> resident_early{0};
  Threads callers, consumers;
  consumers.start([&] {
    for (int n = 0; auto batch = batcher.next(); ++n) {
      if (n % 100 == 99) continue;
      batch->set_outputs(Array({DType::kInt32, {1, batch->size()}},
                               reinterpret_cast<uint8_t*>(actions->data()), actions));
    }
  });
  const auto start = Clock::now();
  for (int c = 0; c < num_callers; ++c) {
    callers.start([&, c] {
      MemoryPool pool;
      for (int i = 0; i < num_each; ++i) {
        const Array frame =
            pool.allocate({DType::kUint8, {1, 1 + (i + c) % 3, 84, 84}});
        ArrayNest::Map observation{{"frame", frame}};
        try {
          if (i % 100 == 50) observation.emplace("no batch dim", frame.row(0).row(0));
          if (i % 100 == 51) observation["frame"] = ArrayNest::Vector{};
          batcher.compute(std::move(observation));
        } catch (const AsyncError&) {
        } catch (const std::invalid_argument&) {
        }
        if (++num_steps == num_callers * num_each / 10) {
          resident_early = resident_bytes();
        }
      }
    });
  }
  callers.join();
  const std::chrono::duration<double> time = Clock::now() - start;
  const size_t resident_late = resident_bytes();
  batcher.close();
  consumers.join();
  std::cout << static_cast<int>(num_steps / time.count()) << " steps/s, resident "
            << resident_early / 1024 << " kB after a tenth, " << resident_late / 1024
            << " kB at the end\n";
#ifndef TB_SANITIZED  // whose memory grows by itself
  EXPECT_LE(resident_late, resident_early + (size_t{4} << 20));
#endif
}

}  // namespace
}  // namespace torchbeast
