#include "array.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>

namespace torchbeast {

namespace {

// By the number of a DType.
struct {
  const char* name;
  size_t size;  // bytes
} constexpr kDTypes[] = {{"unknown", 0}, {"bool", 1},  {"uint8", 1},   {"int8", 1},
                         {"uint16", 2},  {"int16", 2}, {"uint32", 4},  {"int32", 4},
                         {"uint64", 8},  {"int64", 8}, {"float16", 2}, {"float32", 4},
                         {"float64", 8}};

}  // namespace

bool is_dtype(uint64_t number) { return number > 0 && number < std::size(kDTypes); }

size_t item_size(DType dtype) {
  const auto number = static_cast<size_t>(dtype);
  if (is_dtype(number)) return kDTypes[number].size;
  throw std::invalid_argument("no such dtype: " + std::to_string(number));
}

const char* dtype_name(DType dtype) {
  const auto number = static_cast<size_t>(dtype);
  return kDTypes[is_dtype(number) ? number : 0].name;
}

Shape::Shape(std::initializer_list<int64_t> dims) {
  for (int64_t dim : dims) push_back(dim);
}

void Shape::push_back(int64_t dim) {
  if (size_ == kMaxDims) {
    throw std::invalid_argument("an array has more than " + std::to_string(kMaxDims) +
                                " dimensions");
  }
  dims_[size_++] = dim;
}

bool Shape::operator==(const Shape& other) const {
  return size_ == other.size_ && std::equal(begin(), end(), other.begin());
}

Shape Shape::behind(std::initializer_list<int64_t> dims) const {
  Shape shape(dims);
  for (int64_t dim : *this) shape.push_back(dim);
  return shape;
}

Shape Shape::tail() const {
  Shape shape;
  for (size_t i = 1; i < size_; ++i) shape.push_back(dims_[i]);
  return shape;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (size_t i = 0; i < size_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(dims_[i]);
  }
  return text + "]";
}

size_t ArraySpec::num_elements() const {
  size_t count = 1;
  for (int64_t dim : shape) {
    if (dim < 0) {
      throw std::invalid_argument("negative dimension in " + shape.to_string());
    }
    if (__builtin_mul_overflow(count, static_cast<size_t>(dim), &count)) {
      throw std::invalid_argument("too many elements: " + shape.to_string());
    }
  }
  return count;
}

size_t ArraySpec::num_bytes() const {
  size_t bytes;
  if (__builtin_mul_overflow(num_elements(), item_size(dtype), &bytes)) {
    throw std::invalid_argument("too many bytes: " + to_string());
  }
  return bytes;
}

std::string ArraySpec::to_string() const {
  return std::string(dtype_name(dtype)) + " " + shape.to_string();
}

Array Array::row(int64_t i) const {
  if (shape().size() == 0 || i < 0 || i >= shape()[0]) {
    throw std::out_of_range("no row " + std::to_string(i) + " in an array of " +
                            shape().to_string());
  }
  ArraySpec spec = spec_;
  spec.shape[0] = 1;
  return Array(spec, data_ + static_cast<size_t>(i) * spec.num_bytes(), owner_);
}

Array Array::at(int64_t i) const {
  Array one = row(i);
  one.spec_.shape = shape().tail();
  return one;
}

Array Array::with_leading_one() const {
  return Array({dtype(), shape().behind({1})}, data_, owner_);
}

// Blocks come in classes, four to each power of two, so that batches whose size varies
// find blocks to use again.
struct MemoryPool::State {
  explicit State(Allocator allocator)
      : allocate(allocator ? std::move(allocator) : ordinary_block) {}

  static Block ordinary_block(size_t size) {
    void* const data = std::aligned_alloc(64, (size + 63) / 64 * 64);
    if (data == nullptr) throw std::bad_alloc();
    return {static_cast<uint8_t*>(data), std::free};
  }
  static size_t size_class(size_t num_bytes) {
    size_t power = 64;
    while (power < num_bytes) power *= 2;
    for (size_t size : {power / 8 * 5, power / 8 * 6, power / 8 * 7}) {
      if (num_bytes <= size) return size;
    }
    return power;
  }

  const Allocator allocate;
  // Sizes that vary between 1 and any number of entries need 6.5 times the largest.
  static constexpr size_t kMostPerUse = 8;

  mutable Mutex mutex;
  std::map<size_t, std::vector<Block>> free TB_GUARDED_BY(mutex);
  size_t in_use TB_GUARDED_BY(mutex) = 0;  // bytes, as those below
  size_t peak TB_GUARDED_BY(mutex) = 0;    // the most in use at once
  size_t total TB_GUARDED_BY(mutex) = 0;   // in use and free
};

MemoryPool::MemoryPool(Allocator allocator)
    : state_(std::make_shared<State>(std::move(allocator))) {}

Array MemoryPool::allocate(const ArraySpec& spec) {
  const size_t num_bytes = spec.num_bytes();
  if (num_bytes > std::numeric_limits<size_t>::max() / 4) {
    throw std::invalid_argument("too many bytes: " + spec.to_string());
  }
  const size_t size = State::size_class(num_bytes);
  Block block;
  // Destroyed with no lock held, because that may take long.
  std::map<size_t, std::vector<Block>> dropped;
  {
    MutexLock lock(state_->mutex);
    auto& blocks = state_->free[size];
    if (!blocks.empty()) {
      block = std::move(blocks.back());
      blocks.pop_back();
      state_->in_use += size;
    } else if (state_->total + size >
               State::kMostPerUse * std::max(state_->peak, state_->in_use + size)) {
      dropped.swap(state_->free);
      state_->total = state_->in_use;
    }
  }
  if (block == nullptr) {
    // With no lock held: the allocator may want Python's.
    block = state_->allocate(size);
    MutexLock lock(state_->mutex);
    state_->total += size;
    state_->in_use += size;
    state_->peak = std::max(state_->peak, state_->in_use);
  }
  uint8_t* data = block.get();
  // Hands the block back, or lets it go if the pool is gone.
  std::shared_ptr<void> owner(data,
                              [block = std::move(block), size,
                               pool = std::weak_ptr<State>(state_)](void*) mutable {
                                if (auto state = pool.lock()) {
                                  MutexLock lock(state->mutex);
                                  state->in_use -= size;
                                  try {
                                    state->free[size].push_back(std::move(block));
                                  } catch (const std::bad_alloc&) {
                                    state->total -= size;  // it ends with this
                                  }
                                }
                              });
  return Array(spec, data, std::move(owner));
}

size_t MemoryPool::num_bytes() const {
  MutexLock lock(state_->mutex);
  return state_->total;
}

namespace {

struct Split {
  size_t outer;  // product of the dimensions before `dim`
  size_t inner;  // bytes of one element of `dim`
};

Split split(const ArraySpec& spec, size_t dim) {
  Split result{1, item_size(spec.dtype)};
  for (size_t i = 0; i < spec.shape.size(); ++i) {
    const auto size = static_cast<size_t>(spec.shape[i]);
    if (i < dim) result.outer *= size;
    if (i > dim) result.inner *= size;
  }
  return result;
}

// Copies `count` pieces of `size` bytes, which begin every so many bytes.
void copy_pieces(uint8_t* to, size_t to_every, const uint8_t* from, size_t from_every,
                 size_t size, size_t count) {
  if (size == 0) return;  // then the pointers may be null
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_every, from + i * from_every, size);
  }
}

}  // namespace

size_t copy(const Array& from, const Array& to) {
  if (from.spec() != to.spec()) {
    throw std::invalid_argument("cannot copy " + from.spec().to_string() + " into " +
                                to.spec().to_string());
  }
  const size_t size = from.num_bytes();
  copy_pieces(to.data(), 0, from.data(), 0, size, 1);
  return size;
}

bool can_join(const ArraySpec& a, const ArraySpec& b, size_t dim) {
  if (dim >= a.shape.size() || dim >= b.shape.size()) return false;
  ArraySpec with_size_of_a = b;
  with_size_of_a.shape[dim] = a.shape[dim];
  return a == with_size_of_a;
}

Array concatenate(const std::vector<Array>& arrays, size_t dim, MemoryPool& pool) {
  if (arrays.empty()) throw std::invalid_argument("nothing to join");
  ArraySpec joined = arrays[0].spec();
  int64_t size = 0;
  for (const Array& array : arrays) {
    if (!can_join(array.spec(), joined, dim)) {
      throw std::invalid_argument("cannot join " + array.spec().to_string() + " with " +
                                  joined.to_string() + ": only dimension " +
                                  std::to_string(dim) + " may differ");
    }
    size += array.shape()[dim];
  }
  joined.shape[dim] = size;
  Array result = pool.allocate(joined);
  const Split by = split(joined, dim);
  const size_t stride = by.inner * static_cast<size_t>(joined.shape[dim]);
  size_t offset = 0;
  for (const Array& array : arrays) {
    const size_t size = by.inner * static_cast<size_t>(array.shape()[dim]);
    copy_pieces(result.data() + offset, stride, array.data(), size, size, by.outer);
    offset += size;
  }
  return result;
}

Array slice(const Array& array, size_t dim, int64_t begin, int64_t end,
            MemoryPool& pool) {
  if (dim >= array.shape().size() || begin < 0 || begin > end ||
      end > array.shape()[dim]) {
    throw std::out_of_range("no elements " + std::to_string(begin) + " to " +
                            std::to_string(end) + " of dimension " +
                            std::to_string(dim) + " in " + array.shape().to_string());
  }
  ArraySpec spec = array.spec();
  spec.shape[dim] = end - begin;
  Array result = pool.allocate(spec);
  const Split by = split(spec, dim);
  const size_t size = by.inner * static_cast<size_t>(end - begin);
  const size_t stride = by.inner * static_cast<size_t>(array.shape()[dim]);
  copy_pieces(result.data(), size, array.data() + by.inner * static_cast<size_t>(begin),
              stride, size, by.outer);
  return result;
}

}  // namespace torchbeast
