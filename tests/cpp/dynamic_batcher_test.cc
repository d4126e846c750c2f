// DynamicBatcher: every caller gets its part of the answer, or an error.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>

#include "batching.h"
#include "batching_test_util.h"

namespace torchbeast {
namespace {

class DynamicBatcherTest : public GuardedTest {};

std::future<ArrayNest> async_compute(DynamicBatcher& batcher, ArrayNest inputs,
                                     const Interrupt& interrupt = nullptr) {
  return std::async(std::launch::async,
                    [&batcher, inputs = std::move(inputs), interrupt]() mutable {
                      return batcher.compute(std::move(inputs), interrupt);
                    });
}

// Answers

TEST_F(DynamicBatcherTest, EveryCallerGetsItsPart) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    const size_t dim = random() % 3;
    BatchingOptions options = batch_sizes(9, 9);
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
  DynamicBatcher batcher(batch_sizes(1, 9));
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
  DynamicBatcher batcher(batch_sizes(1, 9));
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
                       "at [1]: int32 [3] has no dimension 1"));
  EXPECT_TRUE(contains(refusal(Map{{"a", Vector{}}}), "without any array"));
  batch->set_outputs(good);
  EXPECT_EQ(values_of(answer.get().leaf()), (Values{0, 1, 2}));
}

TEST_F(DynamicBatcherTest, OneAnswerOnly) {
  const std::string before = "the batch was answered before";
  DynamicBatcher batcher(batch_sizes(1, 9));
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

TEST_F(DynamicBatcherTest, RefusesFaultyItems) {
  DynamicBatcher batcher(with_timeout(batch_sizes(4, 4), 60000));
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

TEST_F(DynamicBatcherTest, AllocatorErrorComesThrough) {
  BatchingOptions options = batch_sizes(1, 2);
  options.allocator = [](size_t) -> MemoryPool::Block {
    throw std::domain_error("no pinned memory");
  };
  DynamicBatcher batcher(options);
  auto answer = async_compute(batcher, item(1));
  EXPECT_EQ(error_of<std::domain_error>([&] { batcher.next(); }), "no pinned memory");
  EXPECT_EQ(error_of<AsyncError>([&] { answer.get(); }), "no pinned memory");
}

TEST_F(DynamicBatcherTest, PingPongIsPrompt) {
  DynamicBatcher batcher(batch_sizes(1, 1));
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
  DynamicBatcher batcher(batch_sizes(1, 9));
  EXPECT_FALSE(batcher.is_closed());
  EXPECT_TRUE(batcher.close());
  EXPECT_FALSE(batcher.close());
  EXPECT_TRUE(batcher.is_closed());
  EXPECT_EQ(batcher.next(), nullptr);
  EXPECT_THROW(batcher.compute(item(1)), ClosedBatchingQueue);
}

TEST_F(DynamicBatcherTest, CloseEndsCallersWhereverTheirItemsAre) {
  DynamicBatcher batcher(batch_sizes(2, 2));
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
    DynamicBatcher batcher(batch_sizes(2, 2));
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
    DynamicBatcher batcher(with_queue_size(batch_sizes(5, 5), 2));
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
  DynamicBatcher batcher(batch_sizes(3, 3));
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

// Arrays end outside of locks

TEST_F(DynamicBatcherTest, NoArrayEndsUnderTheLock) {
  std::atomic<int> ended{0};
  DynamicBatcher batcher(batch_sizes(2, 2));
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

// Asking without waiting: what the callback gets, as text.
struct Asked {
  void ask(DynamicBatcher& batcher, ArrayNest inputs) {
    batcher.ask(std::move(inputs), [this](const DynamicBatcher::Answer& answer) {
      ++calls;
      thread = std::this_thread::get_id();
      try {
        outputs = answer();
      } catch (const std::exception& raised) {
        error = raised.what();
      }
    });
  }
  int calls = 0;
  std::thread::id thread;
  ArrayNest outputs;
  std::string error;
};

TEST_F(DynamicBatcherTest, WhoAsksGetsItsPartInTheThreadThatAnswers) {
  DynamicBatcher batcher(batch_sizes(3, 3));
  Asked one, two;
  one.ask(batcher, numbered({1, 2}));
  two.ask(batcher, numbered({1, 1}, 50));
  const auto batch = batcher.next();
  EXPECT_EQ(one.calls + two.calls, 0);
  batch->set_outputs(numbered({4, 3}));
  EXPECT_EQ(one.calls, 1);
  EXPECT_EQ(two.calls, 1);
  EXPECT_EQ(one.thread, std::this_thread::get_id());
  expect_same(one.outputs.leaf(), naive_slice(numbered({4, 3}), 1, 0, 2));
  expect_same(two.outputs.leaf(), naive_slice(numbered({4, 3}), 1, 2, 3));
}

TEST_F(DynamicBatcherTest, WhoAsksGetsEveryEndOnce) {
  DynamicBatcher batcher(batch_sizes(1, 1));
  Asked failed, dropped, waiting, taken;
  failed.ask(batcher, item(1));
  batcher.next()->set_error("no weights");
  EXPECT_EQ(failed.error, "no weights");
  dropped.ask(batcher, item(1));
  batcher.next();
  EXPECT_NE(dropped.error.find("dropped"), std::string::npos);
  taken.ask(batcher, item(1));
  const auto batch = batcher.next();
  waiting.ask(batcher, item(1));
  batcher.close();
  EXPECT_NE(taken.error.find("closed"), std::string::npos);
  EXPECT_NE(waiting.error.find("closed"), std::string::npos);
  batch->set_outputs(item(1));
  Asked late, faulty;
  EXPECT_THROW(late.ask(batcher, item(1)), ClosedBatchingQueue);
  DynamicBatcher other(batch_sizes(1, 1));
  EXPECT_THROW(faulty.ask(other, item(2)), std::invalid_argument);
  EXPECT_EQ(late.calls + faulty.calls, 0);
  for (const Asked* asked : {&failed, &dropped, &waiting, &taken}) {
    EXPECT_EQ(asked->calls, 1);
  }
}

TEST_F(DynamicBatcherTest, WhoAsksNeedsNoRoom) {
  BatchingOptions options = batch_sizes(1, 1);
  options.maximum_queue_size = 1;
  DynamicBatcher batcher(options);
  Asked asked[3];
  for (Asked& one : asked) one.ask(batcher, item(1));
  for (int i = 0; i < 3; ++i) batcher.next()->set_outputs(item(1));
  for (const Asked& one : asked) EXPECT_EQ(one.calls, 1);
}

TEST_F(DynamicBatcherTest, Stats) {
  DynamicBatcher batcher(batch_sizes(5, 5));
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
}

}  // namespace
}  // namespace torchbeast
