// The rules of a step's values, see stream_spec.h.

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "stream_spec.h"

namespace torchbeast {

bool any_truncated(const StreamSpec& spec, const std::vector<Array>& arrays) {
  if (!spec.truncated) return false;
  const uint8_t* const truncated = arrays[*spec.truncated].data();
  return std::any_of(truncated, truncated + spec.num_envs,
                     [](uint8_t value) { return value != 0; });
}

bool is_between_episodes(const StreamSpec& spec, const std::vector<Array>& arrays) {
  const Array& done = arrays[spec.num_observation_arrays + kDoneField];
  return std::all_of(done.data(), done.data() + spec.num_envs,
                     [](uint8_t value) { return value != 0; });
}

namespace {

std::string text_of(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", x);
  return text;
}

// The first number that breaks a rule, and its index.
struct Bad {
  size_t i;
  std::string text;
};

template <typename T>
std::optional<Bad> find_bad(const Array& array, const ValueRule& rule) {
  const T* const x = array.as<T>();
  const size_t size = array.spec().num_elements(), num_bounds = rule.low.size();
  const auto is_bad = [&](size_t i, size_t k) {  // also if it is NaN
    return !(x[i] >= static_cast<T>(rule.low[k]) &&
             x[i] <= static_cast<T>(rule.high[k]));
  };
  if (num_bounds == 1) {
    // Compilers make vector instructions of this.
    const T low = static_cast<T>(rule.low[0]), high = static_cast<T>(rule.high[0]);
    int outside = 0;
    for (size_t i = 0; i < size; ++i) outside |= !(x[i] >= low && x[i] <= high);
    if (outside == 0) return std::nullopt;
  }
  for (size_t i = 0, k = 0; i < size; ++i, k = (k + 1 == num_bounds ? 0 : k + 1)) {
    if (!is_bad(i, k)) continue;
    if constexpr (std::is_integral_v<T>) return Bad{i, std::to_string(x[i])};
    return Bad{i, text_of(static_cast<double>(x[i]))};
  }
  return std::nullopt;
}

// All finite numbers are smaller than the bounds: the largest is 65504.
std::optional<Bad> find_bad_half(const Array& array) {
  const uint16_t* const x = array.as<uint16_t>();
  for (size_t i = 0; i < array.spec().num_elements(); ++i) {
    if ((x[i] & 0x7C00) != 0x7C00) continue;
    return Bad{i, (x[i] & 0x03FF) != 0 ? "nan" : "infinite"};
  }
  return std::nullopt;
}

std::optional<Bad> find_bad(const Array& array, const ValueRule& rule) {
  if (rule.low.empty()) return std::nullopt;
  switch (array.dtype()) {
    case DType::kInt8:
      return find_bad<int8_t>(array, rule);
    case DType::kInt64:
      return find_bad<int64_t>(array, rule);
    case DType::kFloat16:
      return find_bad_half(array);
    case DType::kFloat32:
      return find_bad<float>(array, rule);
    case DType::kFloat64:
      return find_bad<double>(array, rule);
    default:  // every value of it is allowed
      return std::nullopt;
  }
}

}  // namespace

void check_values(const StreamSpec& spec, const std::vector<Array>& arrays) {
  for (size_t k = 0; k < arrays.size(); ++k) {
    const ValueRule& rule = spec.rules[k];
    const std::optional<Bad> bad = find_bad(arrays[k], rule);
    if (!bad) continue;
    const bool is_real = is_float(arrays[k].dtype());
    const size_t per_env =
        arrays[k].spec().num_elements() / static_cast<size_t>(spec.num_envs);
    const size_t element = bad->i % per_env;
    const auto text = [&](const std::vector<double>& bounds) {
      const double x = bounds[bounds.size() == 1 ? 0 : element];
      return is_real ? text_of(x) : std::to_string(static_cast<int64_t>(x));
    };
    refuse(spec.names[k],
           bad->text + " in environment " + std::to_string(bad->i / per_env) +
               (per_env > 1 ? ", element " + std::to_string(element) : "") +
               "; allowed are " + (is_real ? "finite numbers from " : "") +
               text(rule.low) + " to " + text(rule.high));
  }
}

}  // namespace torchbeast
