// What several of the C++ tests need: a guard against hangs, threads, the work of
// stress tests, small arrays, and naive joining and slicing to compare with.

#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#if __has_include(<execinfo.h>)
#include <execinfo.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "array.h"
#include "batching.h"
#include "stream_spec.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TB_SANITIZED
#endif
#endif
#else
#define TB_SANITIZED
#endif

namespace torchbeast {

#if __has_include(<execinfo.h>)
// Says where the process ends if an exception is thrown that nobody catches, or a
// thread is destroyed that runs.
inline const std::terminate_handler default_terminate = std::set_terminate([] {
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  default_terminate();
});
#endif

// A test that hangs says its name and aborts.
class GuardedTest : public testing::Test {
 protected:
  static constexpr unsigned kSeconds = 120;

  void SetUp() override {
    const testing::TestInfo* test =
        testing::UnitTest::GetInstance()->current_test_info();
    std::snprintf(text(), kTextSize, "hung for %u s: %s.%s\n", kSeconds,
                  test->test_suite_name(), test->name());
    signal(SIGALRM, [](int) {
      if (write(STDERR_FILENO, text(), std::strlen(text())) < 0) _exit(1);
      std::abort();
    });
    alarm(kSeconds);
  }
  void TearDown() override { alarm(0); }

 private:
  static constexpr size_t kTextSize = 256;
  static char* text() {
    static char buffer[kTextSize];
    return buffer;
  }
};

// Threads that are joined at the end of the scope at the latest.
class Threads {
 public:
  ~Threads() { join(); }
  void start(std::function<void()> f) { threads_.emplace_back(std::move(f)); }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  std::vector<std::thread> threads_;
};

// The work of a stress test: TB_STRESS_SCALE=0.1 in the environment makes it ten times
// less, for builds with sanitizers.
inline int scaled(int count, int minimum = 1) {
  const char* text = std::getenv("TB_STRESS_SCALE");
  const double scale = text == nullptr ? 1.0 : std::atof(text);
  return std::max(minimum, static_cast<int>(count * scale));
}

inline size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  size_t pages = 0, resident = 0;
  statm >> pages >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

inline BatchingOptions batch_sizes(int64_t minimum, int64_t maximum) {
  BatchingOptions options;
  options.minimum_batch_size = minimum;
  options.maximum_batch_size = maximum;
  return options;
}

// An int32 array with memory of its own, and what is in one.
inline Array make_array(const Shape& shape, const std::vector<int32_t>& values) {
  const ArraySpec spec{DType::kInt32, shape};
  if (values.size() != spec.num_elements()) std::abort();
  auto memory = std::make_shared<std::vector<int32_t>>(values);
  return Array(spec, reinterpret_cast<uint8_t*>(memory->data()), memory);
}

// first, first + 1, ...
inline Array numbered(const Shape& shape, int32_t first = 0) {
  std::vector<int32_t> values(ArraySpec{DType::kInt32, shape}.num_elements());
  for (int32_t& value : values) value = first++;
  return make_array(shape, values);
}

inline std::vector<int32_t> values_of(const Array& array) {
  const int32_t* data = array.as<int32_t>();
  return std::vector<int32_t>(data, data + array.spec().num_elements());
}

// Calls f for every index of an array of this shape, in C order.
inline void for_each_index(const Shape& shape, const std::function<void(Shape)>& f,
                           const Shape& index = {}) {
  if (index.size() == shape.size()) return f(index);
  for (int64_t i = 0; i < shape[index.size()]; ++i) {
    Shape next = index;
    next.push_back(i);
    for_each_index(shape, f, next);
  }
}

inline int32_t element(const Array& array, const Shape& index) {
  int64_t offset = 0;
  for (size_t i = 0; i < index.size(); ++i) {
    offset = offset * array.shape()[i] + index[i];
  }
  return array.as<int32_t>()[offset];
}

inline Array naive_concatenate(const std::vector<Array>& arrays, size_t dim) {
  Shape shape = arrays.at(0).shape();
  shape[dim] = 0;
  for (const Array& array : arrays) shape[dim] += array.shape()[dim];
  std::vector<int32_t> values;
  for_each_index(shape, [&](Shape index) {
    size_t which = 0;
    while (index[dim] >= arrays[which].shape()[dim]) {
      index[dim] -= arrays[which++].shape()[dim];
    }
    values.push_back(element(arrays[which], index));
  });
  return make_array(shape, values);
}

inline Array naive_slice(const Array& array, size_t dim, int64_t begin, int64_t end) {
  std::vector<int32_t> values;
  for_each_index(array.shape(), [&](const Shape& index) {
    if (index[dim] >= begin && index[dim] < end) {
      values.push_back(element(array, index));
    }
  });
  Shape shape = array.shape();
  shape[dim] = end - begin;
  return make_array(shape, values);
}

inline void expect_same(const Array& array, const Array& expected) {
  ASSERT_EQ(array.spec().to_string(), expected.spec().to_string());
  EXPECT_EQ(values_of(array), values_of(expected));
}

// What f throws, as text; "nothing" if it does not throw an E.
template <typename E, typename F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing";
}

// Why f refuses a message.
template <typename F>
std::string refusal(const F& f) {
  const std::string text = error_of<WireError>(f);
  return text == "nothing" ? "accepted" : text;
}

inline testing::AssertionResult contains(const std::string& text,
                                         const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "no '" << part << "' in '" << text << "'";
}

}  // namespace torchbeast
