#include "array.h"

#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <random>

#include "test_util.h"

namespace torchbeast {
namespace {

class ArrayTest : public GuardedTest {};

TEST_F(ArrayTest, DTypes) {
  const struct {
    DType dtype;
    size_t size;
    const char* name;
  } all[] = {
      {DType::kBool, 1, "bool"},       {DType::kUint8, 1, "uint8"},
      {DType::kInt8, 1, "int8"},       {DType::kUint16, 2, "uint16"},
      {DType::kInt16, 2, "int16"},     {DType::kUint32, 4, "uint32"},
      {DType::kInt32, 4, "int32"},     {DType::kUint64, 8, "uint64"},
      {DType::kInt64, 8, "int64"},     {DType::kFloat16, 2, "float16"},
      {DType::kFloat32, 4, "float32"}, {DType::kFloat64, 8, "float64"},
  };
  for (const auto& [dtype, size, name] : all) {
    EXPECT_EQ(item_size(dtype), size) << name;
    EXPECT_STREQ(dtype_name(dtype), name);
    EXPECT_TRUE(is_dtype(static_cast<uint64_t>(dtype)));
  }
  for (uint64_t number : {uint64_t{0}, uint64_t{13}, uint64_t{258}, ~uint64_t{0}}) {
    EXPECT_FALSE(is_dtype(number)) << number;
  }
  EXPECT_THROW(item_size(static_cast<DType>(13)), std::invalid_argument);
}

TEST_F(ArrayTest, Shapes) {
  const Shape shape{5, 3, 7};
  EXPECT_EQ(shape.size(), 3u);
  EXPECT_EQ(shape[2], 7);
  EXPECT_EQ(shape.to_string(), "[5, 3, 7]");
  EXPECT_EQ(Shape{}.to_string(), "[]");
  EXPECT_EQ(shape, (Shape{5, 3, 7}));
  EXPECT_NE(shape, (Shape{5, 3}));
  EXPECT_NE(shape, (Shape{5, 3, 8}));
  EXPECT_EQ((Shape{84, 83}.behind({20, 8})), (Shape{20, 8, 84, 83}));
  Shape longest{1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_THROW(longest.push_back(9), std::invalid_argument);
  EXPECT_THROW(longest.behind({1}), std::invalid_argument);
}

TEST_F(ArrayTest, SpecsCountElementsAndBytes) {
  const ArraySpec spec{DType::kInt16, {5, 3, 7}};
  EXPECT_EQ(spec.num_elements(), 105u);
  EXPECT_EQ(spec.num_bytes(), 210u);
  EXPECT_EQ(spec.to_string(), "int16 [5, 3, 7]");
  EXPECT_EQ((ArraySpec{DType::kFloat64, {}}.num_bytes()), 8u);
  EXPECT_EQ((ArraySpec{DType::kFloat64, {4, 0}}.num_bytes()), 0u);
  EXPECT_NE(spec, (ArraySpec{DType::kUint16, {5, 3, 7}}));
  const int64_t huge = std::numeric_limits<int64_t>::max();
  EXPECT_THROW((ArraySpec{DType::kUint8, {huge, 3}}.num_elements()),
               std::invalid_argument);
  EXPECT_THROW((ArraySpec{DType::kFloat64, {huge}}.num_bytes()), std::invalid_argument);
  EXPECT_THROW((ArraySpec{DType::kUint8, {5, -1}}.num_bytes()), std::invalid_argument);
}

TEST_F(ArrayTest, RowsShareMemory) {
  const Array array = numbered({5, 3, 2});
  const Array row = array.row(4);
  EXPECT_EQ(row.shape(), (Shape{1, 3, 2}));
  EXPECT_EQ(values_of(row), (std::vector<int32_t>{24, 25, 26, 27, 28, 29}));
  EXPECT_EQ(row.data(), array.data() + 4 * 3 * 2 * 4);
  EXPECT_EQ(row.owner(), array.owner());
  EXPECT_THROW(array.row(5), std::out_of_range);
  EXPECT_THROW(array.row(-1), std::out_of_range);
  EXPECT_THROW(numbered({}).row(0), std::out_of_range);

  const Array wrapped = array.with_leading_one();
  EXPECT_EQ(wrapped.shape(), (Shape{1, 5, 3, 2}));
  EXPECT_EQ(wrapped.data(), array.data());
}

TEST_F(ArrayTest, CopyNeedsEqualSpecs) {
  const Array from = numbered({5, 3}, 100);
  const Array to = numbered({5, 3});
  EXPECT_EQ(copy(from, to), 60u);
  EXPECT_EQ(values_of(to), values_of(from));
  EXPECT_TRUE(contains(error_of<std::invalid_argument>([&] {
                         copy(from, numbered({3, 5}));
                       }),
                       "cannot copy int32 [5, 3] into int32 [3, 5]"));
  EXPECT_EQ(copy(numbered({0, 3}), numbered({0, 3})), 0u);
}

TEST_F(ArrayTest, PoolUsesBlocksAgain) {
  MemoryPool pool;
  const ArraySpec spec{DType::kInt32, {5, 3, 7}};
  Array first = pool.allocate(spec);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first.data()) % 64, 0u);
  Array second = pool.allocate(spec);
  EXPECT_NE(first.data(), second.data());
  const size_t held = pool.num_bytes();
  EXPECT_GE(held, 2 * spec.num_bytes());

  uint8_t* memory = first.data();
  Array row = first.row(2);
  first = Array();
  // A row keeps the block.
  EXPECT_NE(pool.allocate(spec).data(), memory);
  const size_t held_by_three = pool.num_bytes();
  row = Array();
  Array third = pool.allocate(spec), fourth = pool.allocate(spec);
  EXPECT_TRUE(third.data() == memory || fourth.data() == memory);
  EXPECT_EQ(pool.num_bytes(), held_by_three);
}

TEST_F(ArrayTest, PoolIsBoundedWhateverSizesAreAskedFor) {
  MemoryPool pool;
  constexpr int64_t kInUse = 1 << 16;
  for (int64_t size = kInUse; size >= 64; size -= size / 8) {
    std::vector<Array> arrays;
    for (int64_t used = 0; used + size <= kInUse; used += size) {
      arrays.push_back(pool.allocate({DType::kUint8, {size}}));
    }
    EXPECT_LE(pool.num_bytes(), 9u * kInUse) << "of blocks of " << size;
  }
  // Batches of any number of entries find blocks to use again.
  MemoryPool batches;
  const auto allocate_all = [&] {
    for (int64_t n = 1; n <= 64; ++n) batches.allocate({DType::kUint8, {n, 1000}});
    return batches.num_bytes();
  };
  EXPECT_EQ(allocate_all(), allocate_all());
}

TEST_F(ArrayTest, PoolBlocksHoldWhatIsAskedFor) {
  MemoryPool pool;
  for (int64_t size = 0; size < 3000; ++size) {
    const Array array = pool.allocate({DType::kUint8, {size}});
    std::memset(array.data(), 0xAB, array.num_bytes());  // AddressSanitizer looks on
  }
  for (int64_t size : {4096, 4097, 5120, 5121, 6144, 7168, 8191}) {
    MemoryPool fresh;
    fresh.allocate({DType::kUint8, {size}});
    EXPECT_GE(fresh.num_bytes(), static_cast<size_t>(size));
    EXPECT_LE(fresh.num_bytes(), static_cast<size_t>(size) * 5 / 4);
  }
}

TEST_F(ArrayTest, ArraysOutliveTheirPool) {
  std::atomic<int> freed{0};
  Array array;
  {
    MemoryPool pool([&](size_t num_bytes) {
      auto memory = std::make_shared<std::vector<uint8_t>>(num_bytes);
      uint8_t* data = memory->data();
      std::shared_ptr<void> owner(data, [&freed, memory](void*) { ++freed; });
      return MemoryPool::Block(owner, data);
    });
    array = pool.allocate({DType::kInt32, {3}});
    pool.allocate({DType::kInt32, {3}});
    EXPECT_EQ(freed, 0);
  }
  EXPECT_EQ(freed, 1);  // the one that nobody uses
  array.as<int32_t>()[2] = 17;
  array = Array();
  EXPECT_EQ(freed, 2);
}

TEST_F(ArrayTest, PoolFromManyThreads) {
  MemoryPool pool;
  Threads threads;
  for (int32_t id = 0; id < 4; ++id) {
    threads.start([&pool, id] {
      std::vector<Array> mine;
      for (int32_t i = 0; i < 500; ++i) {
        mine.push_back(pool.allocate({DType::kInt32, {1 + (i + id) % 5, 7}}));
        int32_t* data = mine.back().as<int32_t>();
        data[0] = data[6] = id;
        if (mine.size() == 3) {
          for (const Array& array : mine) {
            ASSERT_EQ(array.as<int32_t>()[0], id);
            ASSERT_EQ(array.as<int32_t>()[6], id);
          }
          mine.clear();
        }
      }
    });
  }
  threads.join();
  EXPECT_LE(pool.num_bytes(), 4u * 3u * 160u * 2u);
}

TEST_F(ArrayTest, ConcatenateAndSliceLikeTheNaiveOnes) {
  MemoryPool pool;
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    Shape shape;
    const size_t num_dims = 1 + random() % 4;
    for (size_t i = 0; i < num_dims; ++i) shape.push_back(random() % 5);
    const size_t dim = random() % num_dims;
    std::vector<Array> arrays;
    const size_t num_arrays = 1 + random() % 4;
    for (size_t i = 0; i < num_arrays; ++i) {
      shape[dim] = random() % 4;
      arrays.push_back(numbered(shape, static_cast<int32_t>(1000 * i)));
    }
    SCOPED_TRACE(shape.to_string() + " dim " + std::to_string(dim));
    const Array joined = concatenate(arrays, dim, pool);
    expect_same(joined, naive_concatenate(arrays, dim));
    if (joined.num_bytes() > 0) {
      EXPECT_NE(joined.data(), arrays.back().data());
    }

    const int64_t size = joined.shape()[dim];
    const int64_t begin = static_cast<int64_t>(random() % (size + 1));
    const int64_t end = begin + static_cast<int64_t>(random() % (size - begin + 1));
    expect_same(slice(joined, dim, begin, end, pool),
                naive_slice(joined, dim, begin, end));
  }
}

TEST_F(ArrayTest, ConcatenateKeepsEveryDType) {
  MemoryPool pool;
  for (int number = 1; number <= 12; ++number) {
    const auto dtype = static_cast<DType>(number);
    const Array a = pool.allocate({dtype, {2, 1}});
    const Array b = pool.allocate({dtype, {2, 2}});
    const size_t size = item_size(dtype);
    std::memset(a.data(), 1, 2 * size);
    std::memset(b.data(), 2, 4 * size);
    const Array joined = concatenate({a, b}, 1, pool);
    EXPECT_EQ(joined.spec(), (ArraySpec{dtype, {2, 3}}));
    for (size_t i = 0; i < 6 * size; ++i) {
      EXPECT_EQ(joined.data()[i], i / size % 3 == 0 ? 1 : 2);
    }
  }
}

TEST_F(ArrayTest, ConcatenateAndSliceErrors) {
  MemoryPool pool;
  const auto joining = [&](const std::vector<Array>& arrays) {
    return error_of<std::invalid_argument>([&] { concatenate(arrays, 1, pool); });
  };
  const Array bytes({DType::kUint8, {5, 3}}, nullptr, nullptr);
  EXPECT_TRUE(contains(joining({}), "nothing to join"));
  EXPECT_TRUE(contains(joining({numbered({5})}),
                       "cannot join int32 [5] with int32 [5]: only dimension 1"));
  EXPECT_TRUE(contains(joining({numbered({5, 3}), numbered({4, 3})}),
                       "cannot join int32 [4, 3] with int32 [5, 3]"));
  EXPECT_TRUE(contains(joining({numbered({5, 3}), numbered({5})}),
                       "cannot join int32 [5] with int32 [5, 3]"));
  EXPECT_TRUE(contains(joining({numbered({5, 3}), bytes}),
                       "cannot join uint8 [5, 3] with int32 [5, 3]"));

  const Array array = numbered({5, 3});
  EXPECT_THROW(slice(array, 2, 0, 1, pool), std::out_of_range);
  EXPECT_THROW(slice(array, 1, 0, 4, pool), std::out_of_range);
  EXPECT_THROW(slice(array, 1, -1, 2, pool), std::out_of_range);
  EXPECT_THROW(slice(array, 1, 2, 1, pool), std::out_of_range);
}

}  // namespace
}  // namespace torchbeast
