// The system refuses memory: whatever the moment, every caller of a DynamicBatcher gets
// an answer or an error.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <new>
#include <vector>

#include "batching.h"
#include "batching_test_util.h"

#ifndef TB_SANITIZED  // sanitizers have an operator new of their own

namespace {

// Allocations of this thread until one is refused; negative: never.
thread_local int num_allocations_left = -1;

void* allocate(std::size_t size) {
  if (num_allocations_left == 0) throw std::bad_alloc();
  if (num_allocations_left > 0) --num_allocations_left;
  if (void* const memory = std::malloc(size > 0 ? size : 1)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace torchbeast {
namespace {

class RefusedMemoryTest : public GuardedTest {};

TEST_F(RefusedMemoryTest, EveryCallerGetsAnEnd) {
  int num_refused = 0;
  for (int n = 0;; ++n) {
    DynamicBatcher batcher(batch_sizes(2, 2));
    std::vector<std::future<bool>> callers;  // whether there was an answer
    for (int i = 0; i < 2; ++i) {
      callers.push_back(std::async(std::launch::async, [&] {
        try {
          batcher.compute(item(1));
          return true;
        } catch (const AsyncError&) {
          return false;
        }
      }));
    }
    wait_for_size(batcher, 2);
    const ArrayNest outputs = item(2);
    bool is_refused = false;
    num_allocations_left = n;
    try {
      const auto batch = batcher.next();
      batch->set_outputs(outputs);
    } catch (const std::bad_alloc&) {
      is_refused = true;
    }
    num_allocations_left = -1;
    if (is_refused && batcher.size() > 0) {
      // It has left the items: the next consumer answers.
      batcher.next()->set_outputs(outputs);
      for (auto& caller : callers) EXPECT_TRUE(caller.get());
      ++num_refused;
      continue;
    }
    for (auto& caller : callers) EXPECT_EQ(caller.get(), !is_refused);
    if (!is_refused) break;
    ++num_refused;
  }
  EXPECT_GT(num_refused, 5);
}

}  // namespace
}  // namespace torchbeast

#endif
