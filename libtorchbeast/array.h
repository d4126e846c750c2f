// Arrays: dtype, shape and shared memory. What NumPy and torch arrays are on this side.
//
// Memory lives as long as an Array in it. A row of an Array shares its memory, so it
// may outlive that Array, and keeps all of the memory.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "nest/nest.h"
#include "sync.h"

namespace torchbeast {

// The numbers are the wire's, see proto/torchbeast.proto.
enum class DType : uint8_t {
  kBool = 1,
  kUint8 = 2,
  kInt8 = 3,
  kUint16 = 4,
  kInt16 = 5,
  kUint32 = 6,
  kInt32 = 7,
  kUint64 = 8,
  kInt64 = 9,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
};

bool is_dtype(uint64_t number);
inline bool is_float(DType dtype) { return dtype >= DType::kFloat16; }
size_t item_size(DType dtype);        // bytes; std::invalid_argument if there is none
const char* dtype_name(DType dtype);  // as NumPy writes it, such as "uint8"

// The sizes of up to eight dimensions, without memory of its own on the heap. What
// would make it longer throws std::invalid_argument.
class Shape {
 public:
  static constexpr size_t kMaxDims = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);

  void push_back(int64_t dim);
  size_t size() const { return size_; }
  int64_t operator[](size_t i) const { return dims_[i]; }
  int64_t& operator[](size_t i) { return dims_[i]; }
  const int64_t* begin() const { return dims_.data(); }
  const int64_t* end() const { return dims_.data() + size_; }
  bool operator==(const Shape& other) const;
  bool operator!=(const Shape& other) const { return !(*this == other); }

  // This shape behind `dims`: Shape{84, 84}.behind({20, 8}) is [20, 8, 84, 84].
  Shape behind(std::initializer_list<int64_t> dims) const;
  Shape tail() const;             // without the first dimension
  std::string to_string() const;  // "[20, 8, 84, 84]"

 private:
  uint8_t size_ = 0;
  std::array<int64_t, kMaxDims> dims_{};
};

struct ArraySpec {
  DType dtype = DType::kUint8;
  Shape shape;

  // Elements and bytes; std::invalid_argument on a negative dimension or an overflow.
  size_t num_elements() const;
  size_t num_bytes() const;
  bool operator==(const ArraySpec& o) const {
    return dtype == o.dtype && shape == o.shape;
  }
  bool operator!=(const ArraySpec& o) const { return !(*this == o); }
  std::string to_string() const;  // "uint8 [8, 84, 84, 4]"
};

// A C-contiguous array. Copies share the memory, and the last one frees it. One thread
// at a time writes, and nobody else reads then; reading alone is thread-safe.
class Array {
 public:
  Array() = default;
  // `owner` keeps `data` alive.
  Array(ArraySpec spec, uint8_t* data, std::shared_ptr<void> owner)
      : spec_(std::move(spec)), data_(data), owner_(std::move(owner)) {}

  const ArraySpec& spec() const { return spec_; }
  DType dtype() const { return spec_.dtype; }
  const Shape& shape() const { return spec_.shape; }
  uint8_t* data() const { return data_; }
  size_t num_bytes() const { return spec_.num_bytes(); }
  const std::shared_ptr<void>& owner() const { return owner_; }

  // Row i of the first dimension, sharing memory: [T, n, ...] -> [1, n, ...]. Throws
  // std::out_of_range.
  Array row(int64_t i) const;
  // The same without the dimension: [T, n, ...] -> [n, ...].
  Array at(int64_t i) const;
  // The same memory with another first dimension put in front: [n, ...] -> [1, n, ...].
  // Throws std::invalid_argument if there are eight already.
  Array with_leading_one() const;
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  ArraySpec spec_;
  uint8_t* data_ = nullptr;
  std::shared_ptr<void> owner_;
};

using ArrayNest = nest::Nest<Array>;
using SpecNest = nest::Nest<ArraySpec>;

// Memory for arrays that are used again and again: a block goes back to its pool when
// the last array in it is gone, from whatever thread, also after the pool itself.
// Blocks come in sizes. If the sizes that are asked for change, what a pool holds stays
// below 9 times the most that was in use at once; then it gives free blocks back to the
// system. Thread-safe.
//
// A block is used again as soon as no array is in it. If a copy from it runs on its
// own, as a GPU's from pinned memory, keep the array until the copy is done.
class MemoryPool {
 public:
  using Block = std::shared_ptr<uint8_t>;
  // Makes a block of at least this many bytes; nullptr: ordinary memory, aligned to 64
  // bytes. Python hands in pinned memory here.
  using Allocator = std::function<Block(size_t num_bytes)>;

  explicit MemoryPool(Allocator allocator = nullptr);

  // The contents may be anything. Throws std::bad_alloc, what the allocator throws, and
  // std::invalid_argument as ArraySpec::num_bytes().
  Array allocate(const ArraySpec& spec);
  // Bytes of all blocks, in use and free.
  size_t num_bytes() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Copies every element; the specs must be equal (std::invalid_argument). Returns the
// number of bytes.
size_t copy(const Array& from, const Array& to);

// Whether the dtypes and all dimensions but `dim`, which both have, are equal.
bool can_join(const ArraySpec& a, const ArraySpec& b, size_t dim);
// Joins arrays along `dim` into memory of `pool`: [T, n_i, ...] -> [T, sum n_i, ...].
// std::invalid_argument if there are none or one can't be joined.
Array concatenate(const std::vector<Array>& arrays, size_t dim, MemoryPool& pool);

// Elements [begin, end) of `dim`, copied into memory of `pool`. Throws
// std::out_of_range if they are not there.
Array slice(const Array& array, size_t dim, int64_t begin, int64_t end,
            MemoryPool& pool);

}  // namespace torchbeast
