#include "wire.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>

namespace torchbeast {
namespace {

namespace io = google::protobuf::io;
using google::protobuf::MessageLite;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "as the wire is");
static_assert(static_cast<int>(wire::BOOL) == static_cast<int>(DType::kBool) &&
                  static_cast<int>(wire::FLOAT64) == static_cast<int>(DType::kFloat64),
              "DType has the wire's numbers");

// Field numbers of proto/torchbeast.proto, where this file reads or writes them itself.
enum : uint32_t { kHelloField = 1, kStepField = 2, kErrorField = 3 };  // EnvMessage
enum : uint32_t { kActionField = 2 };                                  // AgentMessage
enum : uint32_t { kArraysField = 1, kFinalObservationField = 2 };  // EnvStep, and so on
enum : uint32_t { kEnvNanosecondsField = 3 };                      // EnvStep
enum : uint32_t { kDTypeField = 1, kShapeField = 2, kDataField = 3 };  // Array

// The encoding's ways to write a field, as the low three bits of its tag say.
enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,  // length, then bytes: also messages, strings and packed numbers
  kFixed32 = 5,
};

[[noreturn]] void refuse(const std::string& place, const std::string& why) {
  throw WireError(place + ": " + why);
}

// --- Text ----------------------------------------------------------------------------

// The number of bytes of the character at text[i]; 0 if it is not UTF-8.
size_t utf8_length(const std::string& text, size_t i) {
  const auto byte = [&](size_t k) -> uint32_t {
    return i + k < text.size() ? static_cast<uint8_t>(text[i + k]) : 0;
  };
  const uint32_t first = byte(0);
  if (first < 0x80) return 1;
  if (first < 0xC0 || first > 0xF7) return 0;
  const size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  uint32_t code = first & (0x7Fu >> length);
  for (size_t k = 1; k < length; ++k) {
    if ((byte(k) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(k) & 0x3F);
  }
  const uint32_t smallest = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  return code >= smallest && code <= 0x10FFFF && !surrogate ? length : 0;
}

bool is_utf8(const std::string& text) {
  for (size_t i = 0, length; i < text.size(); i += length) {
    length = utf8_length(text, i);
    if (length == 0) return false;
  }
  return true;
}

std::string to_utf8(const std::string& bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size();) {
    const size_t length = utf8_length(bytes, i);
    if (length == 0) {
      text += "\xEF\xBF\xBD";  // U+FFFD, the replacement character
      ++i;
    } else {
      text.append(bytes, i, length);
      i += length;
    }
  }
  return text;
}

// A peer's name, for errors: of bounded length, and on one line.
std::string quoted(const std::string& name) {
  constexpr size_t kMax = 64;
  size_t size = std::min(name.size(), kMax);
  while (size < name.size() && size > 0 && (name[size] & 0xC0) == 0x80) --size;
  std::string text = to_utf8(name.substr(0, size));
  for (char& c : text) {
    if (static_cast<uint8_t>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return '"' + text + (size < name.size() ? "...\"" : "\"");
}

void check_name(const std::string& name, const std::string& place) {
  if (name.size() > kMaxNameBytes) {
    refuse(place, "the name " + quoted(name) + " has " + std::to_string(name.size()) +
                      " bytes, at most " + std::to_string(kMaxNameBytes) +
                      " are allowed");
  }
  if (!is_utf8(name)) refuse(place, "the name " + quoted(name) + " is not UTF-8");
}

// --- Shapes --------------------------------------------------------------------------

// Appends a dimension from the wire. `place` is called for its name if it is refused.
template <typename Place>
void add_dim(Shape* shape, uint64_t dim, size_t max_dims, const Place& place) {
  if (shape->size() == max_dims) {
    refuse(place(), "more than " + std::to_string(max_dims) + " dimensions");
  }
  if (dim > static_cast<uint64_t>(kMaxMessageBytes)) {
    refuse(place(), "a dimension of " + std::to_string(dim) + ", at most " +
                        std::to_string(kMaxMessageBytes) + " is allowed");
  }
  shape->push_back(static_cast<int64_t>(dim));
}

// Whether an array fits into a message. A dimension of 0 counts as 1: NumPy refuses
// arrays whose other dimensions multiply to too much, too.
bool fits_message(const ArraySpec& spec) {
  uint64_t bytes = item_size(spec.dtype);
  for (int64_t dim : spec.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(std::max<int64_t>(dim, 1)),
                               &bytes)) {
      return false;
    }
  }
  return bytes <= static_cast<uint64_t>(kMaxMessageBytes);
}

std::string too_large(const ArraySpec& spec) {
  return spec.to_string() + " is larger than a message may be, " +
         std::to_string(kMaxMessageBytes) + " bytes";
}

template <typename Place>
DType checked_dtype(uint64_t number, const Place& place) {
  if (!is_dtype(number)) {
    refuse(place(), "no such dtype: " + std::to_string(static_cast<int64_t>(number)) +
                        ", allowed are 1 to 12");
  }
  return static_cast<DType>(number);
}

// Of an enum's number, which may be any int32.
DType checked_dtype(wire::DType dtype, const std::string& place) {
  return checked_dtype(static_cast<uint64_t>(static_cast<int64_t>(dtype)),
                       [&] { return place; });
}

// --- Sizes of messages ---------------------------------------------------------------

const ArraySpec& spec_of(const ArraySpec& spec) { return spec; }
const ArraySpec& spec_of(const Array& array) { return array.spec(); }

// Bytes of a field that holds this many bytes; all field numbers are below 16.
size_t field_bytes(size_t content) {
  return 1 + io::CodedOutputStream::VarintSize64(content) + content;
}

size_t packed_bytes(const Shape& shape) {
  size_t bytes = 0;
  for (int64_t dim : shape) {
    bytes += io::CodedOutputStream::VarintSize64(static_cast<uint64_t>(dim));
  }
  return bytes;
}

// Bytes of an Array message.
size_t array_bytes(const ArraySpec& spec) {
  size_t bytes = 2;  // dtype
  if (spec.shape.size() > 0) bytes += field_bytes(packed_bytes(spec.shape));
  const size_t data = spec.num_bytes();
  if (data > 0) bytes += field_bytes(data);
  return bytes;
}

// Bytes of a step or an action, and of the message around it.
struct MessageSize {
  size_t body = 0;
  size_t largest = 0;        // bytes of data of the largest array
  size_t largest_begin = 0;  // where in the body they begin
  size_t header() const { return field_bytes(body) - body; }
  size_t total() const { return field_bytes(body); }
};

// Bytes of a number's field, which is left out where it is 0.
size_t number_bytes(uint64_t number) {
  return number == 0 ? 0 : 1 + io::CodedOutputStream::VarintSize64(number);
}

template <typename T>
MessageSize message_size(const std::vector<T>& arrays,
                         const std::vector<T>& final_observation,
                         uint64_t env_nanoseconds) {
  MessageSize size;
  for (const auto* list : {&arrays, &final_observation}) {
    for (const T& array : *list) {
      size.body += field_bytes(array_bytes(spec_of(array)));
      const size_t data = spec_of(array).num_bytes();  // the end of the field
      if (data > size.largest) {
        size.largest = data;
        size.largest_begin = size.body - data;
      }
    }
  }
  size.body += number_bytes(env_nanoseconds);
  return size;
}

// What a step or an action may be, whoever makes it.
template <typename T>
MessageSize checked_message_size(const std::vector<T>& arrays,
                                 const std::vector<T>& final_observation,
                                 uint64_t env_nanoseconds, const std::string& what) {
  for (const auto* list : {&arrays, &final_observation}) {
    if (list->size() > static_cast<size_t>(kMaxArrays)) {
      refuse(what, std::to_string(list->size()) + " arrays, at most " +
                       std::to_string(kMaxArrays) + " are allowed");
    }
    for (const T& array : *list) {
      if (!fits_message(spec_of(array))) refuse(what, too_large(spec_of(array)));
    }
  }
  const MessageSize size = message_size(arrays, final_observation, env_nanoseconds);
  if (size.total() > static_cast<size_t>(kMaxMessageBytes)) {
    refuse(what, "a message would have " + std::to_string(size.total()) +
                     " bytes, at most " + std::to_string(kMaxMessageBytes) +
                     " are allowed");
  }
  return size;
}

// --- Spaces --------------------------------------------------------------------------

template <typename Dims>
Shape space_shape(const Dims& dims, const std::string& place) {
  Shape shape;
  for (uint64_t dim : dims) {
    add_dim(&shape, dim, kMaxSpaceDims, [&] { return place; });
  }
  return shape;
}

// What `num_envs` arrays make together.
ArraySpec batched(DType dtype, const Shape& shape, int64_t num_envs,
                  const std::string& place) {
  ArraySpec spec{dtype, shape.behind({num_envs})};
  if (!fits_message(spec)) refuse(place, too_large(spec));
  return spec;
}

class SpaceReader {
 public:
  SpaceReader(int64_t num_envs, SpaceOf what) : num_envs_(num_envs), what_(what) {}

  // In the order of the arrays.
  std::vector<std::string> names;
  std::vector<ValueRule> rules;

  SpecNest read(const wire::Space& space, const std::string& place, int level) {
    if (level > kMaxDepth) {
      refuse(place, "spaces are nested deeper than " + std::to_string(kMaxDepth) +
                        " levels, which is the most allowed");
    }
    switch (space.kind_case()) {
      case wire::Space::kBox:
        return read_box(space.box(), place);
      case wire::Space::kDiscrete:
        return read_discrete(space.discrete(), place);
      case wire::Space::kMultiDiscrete:
        return read_multi_discrete(space.multi_discrete(), place);
      case wire::Space::kMultiBinary:
        return leaf(DType::kInt8, space_shape(space.multi_binary().shape(), place),
                    place, {ValueRule::kBinary, 0, {}, {}});
      case wire::Space::kTuple:
        return read_tuple(space.tuple(), place, level);
      case wire::Space::kDict:
        return read_dict(space.dict(), place, level);
      case wire::Space::KIND_NOT_SET:
        break;
    }
    refuse(place,
           "a space without a kind; allowed are box, discrete, multi_discrete, "
           "multi_binary, tuple and dict");
  }

 private:
  void count(const std::string& place) {
    if (++num_arrays_ > kMaxArrays) {
      refuse(place, "the space has more than " + std::to_string(kMaxArrays) +
                        " arrays, which is the most allowed");
    }
  }

  SpecNest leaf(DType dtype, const Shape& shape, const std::string& place,
                ValueRule rule) {
    count(place);
    const ArraySpec spec = batched(dtype, shape, num_envs_, place);
    count_elements(static_cast<int64_t>(spec.num_elements()) / num_envs_, place);
    names.push_back(place);
    rules.push_back(std::move(rule));
    return SpecNest(spec);
  }

  void count_elements(int64_t number, const std::string& place) {
    num_elements_ += number;
    const int64_t most =
        what_ == SpaceOf::kObservation ? kMaxElements : kMaxActionNumbers;
    if (num_elements_ > most) {
      refuse(place, "the space has " + std::to_string(num_elements_) +
                        " elements or more, at most " + std::to_string(most) +
                        " are allowed");
    }
  }

  void count_choices(int64_t n, const std::string& place) {
    const int64_t most =
        what_ == SpaceOf::kObservation ? kMaxChoices : kMaxActionNumbers;
    if (n > most - num_choices_) {
      refuse(place, "n is " + std::to_string(n) +
                        ", and all n of a space together may "
                        "be at most " +
                        std::to_string(most));
    }
    num_choices_ += n;
  }

  SpecNest read_discrete(const wire::Space::Discrete& space, const std::string& place) {
    check_range(space.n(), space.start(), place);
    count_choices(space.n(), place);
    return leaf(DType::kInt64, Shape(), place,
                range_rule({space.n()}, {space.start()}));
  }

  // An action counts from 0.
  ValueRule range_rule(const std::vector<int64_t>& n,
                       const std::vector<int64_t>& start) const {
    ValueRule rule;
    rule.kind = ValueRule::kRange;
    for (size_t i = 0; i < n.size(); ++i) {
      const int64_t low = what_ == SpaceOf::kAction ? 0 : start[i];
      rule.low.push_back(low);
      rule.high.push_back(low + (n[i] - 1));
    }
    return rule;
  }

  // Whether an array of this dtype can hold a bound; infinite ones are none.
  static bool holds(DType dtype, double bound) {
    switch (dtype) {
      case DType::kBool:
        return bound >= 0 && bound <= 1;
      case DType::kUint8:
        return bound >= 0 && bound <= 0xFF;
      case DType::kInt8:
        return std::abs(bound + 0.5) <= 127.5;
      case DType::kUint16:
        return bound >= 0 && bound <= 0xFFFF;
      case DType::kInt16:
        return std::abs(bound + 0.5) <= 32767.5;
      case DType::kUint32:
        return bound >= 0 && bound <= 0xFFFFFFFF;
      case DType::kInt32:
        return std::abs(bound + 0.5) <= 2147483647.5;
      // float64 has their ends rounded.
      case DType::kUint64:
        return bound >= 0 && bound <= 0x1p64;
      case DType::kInt64:
        return std::abs(bound) <= 0x1p63;
      default:
        return true;  // a float beyond the dtype's largest is no bound either
    }
  }

  SpecNest read_box(const wire::Space::Box& box, const std::string& place) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const ArraySpec one{checked_dtype(box.dtype(), place),
                        space_shape(box.shape(), place)};
    batched(one.dtype, one.shape, num_envs_, place);  // not too large to be counted
    const size_t size = one.num_elements();
    const auto low = static_cast<size_t>(box.low_size());
    const auto high = static_cast<size_t>(box.high_size());
    for (const auto& [name, count] : {std::pair("low", low), std::pair("high", high)}) {
      if (count > 1 && count != size) {
        refuse(place, std::string("Box with ") + std::to_string(count) + " values in " +
                          name + "; allowed are 0, 1 or " + std::to_string(size) +
                          ", the number of elements");
      }
    }
    ValueRule rule;
    const bool is_float = one.dtype == DType::kFloat16 ||
                          one.dtype == DType::kFloat32 || one.dtype == DType::kFloat64;
    const bool is_wide = one.dtype == DType::kInt64 || one.dtype == DType::kUint64;
    if (is_float || is_wide) rule = {ValueRule::kMagnitude, kMaxMagnitude, {}, {}};
    for (size_t i = 0; i < std::max(low, high); ++i) {
      // A bound that is not given is infinite.
      const double from =
          low == 0 ? -kInfinity : box.low(static_cast<int>(low == 1 ? 0 : i));
      const double to =
          high == 0 ? kInfinity : box.high(static_cast<int>(high == 1 ? 0 : i));
      const auto bad = [&](const std::string& why) {
        refuse(place, "Box with bounds " + std::to_string(from) + " to " +
                          std::to_string(to) + " of element " + std::to_string(i) +
                          "; " + why);
      };
      if (!(from <= to)) bad("low must be at most high");  // also where one is NaN
      if (from == kInfinity || to == -kInfinity) bad("nothing lies between");
      for (const double bound : {from, to}) {
        if (!std::isinf(bound) && !holds(one.dtype, bound)) {
          bad(std::string("one is outside of the dtype, ") + dtype_name(one.dtype));
        }
        // Wide integers may be as large as a bound says that is exact.
        if (is_wide && std::abs(bound) <= 0x1p53) {
          rule.magnitude = std::max(rule.magnitude, std::abs(bound));
        }
      }
    }
    return leaf(one.dtype, one.shape, place, std::move(rule));
  }

  static void check_range(int64_t n, int64_t start, const std::string& place) {
    if (n < 1) refuse(place, "n is " + std::to_string(n) + ", must be 1 or more");
    int64_t last;
    if (__builtin_add_overflow(start, n - 1, &last)) {
      refuse(place, "start " + std::to_string(start) + " and n " + std::to_string(n) +
                        " exceed int64");
    }
  }

  SpecNest read_multi_discrete(const wire::Space::MultiDiscrete& space,
                               const std::string& place) {
    if (space.start_size() != 0 && space.start_size() != space.n_size()) {
      refuse(place, "MultiDiscrete with " + std::to_string(space.start_size()) +
                        " values in start; allowed are 0 or " +
                        std::to_string(space.n_size()) + ", as many as in n");
    }
    const std::vector<int64_t> n(space.n().begin(), space.n().end());
    std::vector<int64_t> start(space.start().begin(), space.start().end());
    start.resize(n.size(), 0);
    for (size_t i = 0; i < n.size(); ++i) {
      const std::string at = place + "[" + std::to_string(i) + "]";
      check_range(n[i], start[i], at);
      count_choices(n[i], at);
    }
    return leaf(DType::kInt64, Shape{space.n_size()}, place, range_rule(n, start));
  }

  SpecNest read_tuple(const wire::Space::Tuple& tuple, const std::string& place,
                      int level) {
    if (tuple.items_size() == 0) count(place);
    SpecNest::Vector items;
    for (int i = 0; i < tuple.items_size(); ++i) {
      items.push_back(
          read(tuple.items(i), place + "[" + std::to_string(i) + "]", level + 1));
    }
    return SpecNest(std::move(items));
  }

  SpecNest read_dict(const wire::Space::Dict& dict, const std::string& place,
                     int level) {
    if (dict.keys_size() != dict.values_size()) {
      refuse(place, "Dict with " + std::to_string(dict.keys_size()) + " keys and " +
                        std::to_string(dict.values_size()) +
                        " values; there must be as many of both");
    }
    if (dict.keys_size() == 0) count(place);
    std::map<std::string, const wire::Space*> values;  // in the order of the arrays
    for (int i = 0; i < dict.keys_size(); ++i) {
      const std::string& key = dict.keys(i);
      check_name(key, place);
      if (!values.emplace(key, &dict.values(i)).second) {
        refuse(place, "the key " + quoted(key) + " comes twice");
      }
    }
    SpecNest::Map items;
    for (const auto& [key, value] : values) {
      items.emplace(key, read(*value, place + "[" + quoted(key) + "]", level + 1));
    }
    return SpecNest(std::move(items));
  }

  const int64_t num_envs_;
  const SpaceOf what_;
  int64_t num_arrays_ = 0;
  int64_t num_elements_ = 0;
  int64_t num_choices_ = 0;
};

}  // namespace

SpecNest space_spec(const wire::Space& space, int64_t num_envs,
                    const std::string& place, SpaceOf what,
                    std::vector<std::string>* names, std::vector<ValueRule>* rules) {
  if (num_envs < 1 || num_envs > kMaxEnvs) {
    refuse(place, std::to_string(num_envs) + " environments, allowed are 1 to " +
                      std::to_string(kMaxEnvs));
  }
  SpaceReader reader(num_envs, what);
  SpecNest spec = reader.read(space, place, 1);
  if (spec.empty()) refuse(place, "the space has no array at all");
  if (names != nullptr) *names = std::move(reader.names);
  if (rules != nullptr) *rules = std::move(reader.rules);
  return spec;
}

namespace {

void check_settings(const wire::EnvHello& hello) {
  if (hello.settings_size() > kMaxSettings) {
    refuse("hello", std::to_string(hello.settings_size()) + " settings, at most " +
                        std::to_string(kMaxSettings) + " are allowed");
  }
  std::set<std::string> names;
  for (const wire::Setting& setting : hello.settings()) {
    const std::string place = "setting " + quoted(setting.name());
    check_name(setting.name(), "setting");
    if (setting.name().empty()) refuse(place, "the name is empty");
    if (!names.insert(setting.name()).second) refuse(place, "the name comes twice");
    if (setting.value().size() > kMaxNameBytes) {
      refuse(place, "the value has " + std::to_string(setting.value().size()) +
                        " bytes, at most " + std::to_string(kMaxNameBytes) +
                        " are allowed");
    }
    if (!is_utf8(setting.value())) refuse(place, "the value is not UTF-8");
  }
}

}  // namespace

StreamSpec::StreamSpec(const wire::EnvHello& hello)
    : environment(hello.environment()), num_envs(hello.num_envs()) {
  if (hello.version() != kWireVersion) {
    refuse("hello", "version " + std::to_string(hello.version()) +
                        " of the protocol; this side speaks version " +
                        std::to_string(kWireVersion));
  }
  check_name(environment, "hello.environment");
  if (hello.stream_id().size() > kMaxStreamIdBytes) {
    refuse("hello.stream_id", std::to_string(hello.stream_id().size()) +
                                  " bytes, at most " +
                                  std::to_string(kMaxStreamIdBytes) + " are allowed");
  }
  // Steps are counted on from it.
  constexpr uint64_t kMaxFirstStep = std::numeric_limits<int64_t>::max();
  if (hello.first_step() > kMaxFirstStep) {
    refuse("hello.first_step", "is " + std::to_string(hello.first_step()) +
                                   ", at most " + std::to_string(kMaxFirstStep) +
                                   " is allowed");
  }
  if (num_envs < 1 || num_envs > kMaxEnvs) {
    refuse("hello", "num_envs is " + std::to_string(num_envs) + ", allowed are 1 to " +
                        std::to_string(kMaxEnvs));
  }
  check_settings(hello);

  observation = space_spec(hello.observation_space(), num_envs, "observation",
                           SpaceOf::kObservation, &names, &rules);
  arrays = observation.flatten();
  num_observation_arrays = arrays.size();
  has_action = hello.has_action_space();
  std::vector<ValueRule> action_rules;
  if (has_action) {
    action = space_spec(hello.action_space(), num_envs, "action", SpaceOf::kAction,
                        nullptr, &action_rules);
    checked_message_size(action.flatten(), {}, 0,
                         "an action of " + std::to_string(num_envs) + " environments");
  }
  const auto add_field = [&](const std::string& name, const ArraySpec& spec,
                             ValueRule rule) {
    names.push_back(name);
    arrays.push_back(spec);
    rules.push_back(std::move(rule));
  };
  const ValueRule finite{
      ValueRule::kMagnitude, std::numeric_limits<float>::max(), {}, {}};
  const ValueRule count{ValueRule::kRange, 0, {0}, {kMaxStep}};
  add_field("reward", {DType::kFloat32, {num_envs}},
            {ValueRule::kMagnitude, kMaxMagnitude, {}, {}});
  add_field("done", {DType::kBool, {num_envs}}, {});
  add_field("episode_step", {DType::kInt64, {num_envs}}, count);
  add_field("episode_return", {DType::kFloat32, {num_envs}}, finite);

  if (hello.extra_fields_size() > kMaxArrays) {
    refuse("hello", std::to_string(hello.extra_fields_size()) +
                        " extra fields, where a step has at most " +
                        std::to_string(kMaxArrays) + " arrays");
  }
  // Those with a meaning, what one environment's is, and what it may be.
  struct Known {
    ArraySpec spec;
    ValueRule rule;
  };
  std::map<std::string, Known> known = {
      {"truncated", {{DType::kBool, {}}, {}}},
      {"game_over", {{DType::kBool, {}}, {}}},
      {"game_step", {{DType::kInt64, {}}, count}},
      {"game_return", {{DType::kFloat32, {}}, finite}}};
  if (has_action && action.is_leaf()) {
    ArraySpec one{action.leaf().dtype, {}};
    for (size_t i = 1; i < action.leaf().shape.size(); ++i) {
      one.shape.push_back(action.leaf().shape[i]);
    }
    ValueRule rule = action_rules[0];
    if (rule.kind == ValueRule::kMagnitude) rule.magnitude = finite.magnitude;
    known["last_action"] = {one, rule};
  }
  const std::set<std::string> reserved = {"observation", "reward", "done",
                                          "episode_step", "episode_return"};
  std::set<std::string> taken = reserved;
  bool has_truncated = false;
  for (const wire::Field& field : hello.extra_fields()) {
    const std::string place = "extra field " + quoted(field.name());
    check_name(field.name(), "extra field");
    if (field.name().empty()) refuse(place, "the name is empty");
    if (!taken.insert(field.name()).second) {
      refuse(place, reserved.count(field.name()) > 0 ? "the name is taken by the step"
                                                     : "the name comes twice");
    }
    const ArraySpec one{checked_dtype(field.dtype(), place),
                        space_shape(field.shape(), place)};
    ValueRule rule;
    const auto found = known.find(field.name());
    if (found != known.end()) {
      if (one != found->second.spec) {
        refuse(place,
               "is " + one.to_string() + ", must be " + found->second.spec.to_string());
      }
      rule = found->second.rule;
    }
    has_truncated = has_truncated || field.name() == "truncated";
    add_field(field.name(), batched(one.dtype, one.shape, num_envs, place), rule);
    extra_fields.push_back(field.name());
  }

  // The largest step, with a final observation, must fit into a message.
  std::vector<ArraySpec> final_observation;
  if (has_truncated) {
    final_observation.assign(
        arrays.begin(),
        arrays.begin() + static_cast<ptrdiff_t>(num_observation_arrays));
  }
  checked_message_size(arrays, final_observation, std::numeric_limits<uint64_t>::max(),
                       "a step of " + std::to_string(num_envs) + " environments");
}

// --- Values --------------------------------------------------------------------------

namespace {

// Numbers other than 0 and 1 are no bools: undefined behaviour in NumPy and torch.
bool are_bools(const uint8_t* data, size_t size) {
  uint64_t bits = 0;
  size_t i = 0;
  for (uint64_t eight; i + sizeof(eight) <= size; i += sizeof(eight)) {
    std::memcpy(&eight, data + i, sizeof(eight));
    bits |= eight;
  }
  for (; i < size; ++i) bits |= data[i];
  return (bits & ~uint64_t{0x0101010101010101}) == 0;
}

// Written so that compilers make vector instructions of it; NaN is not within.
template <typename T>
bool all_within(const Array& array, T low, T high) {
  const T* const x = array.as<T>();
  const size_t size = array.spec().num_elements();
  int outside = 0;
  for (size_t i = 0; i < size; ++i) outside |= !(x[i] >= low && x[i] <= high);
  return outside == 0;
}

bool keeps(const ValueRule& rule, const Array& array) {
  switch (rule.kind) {
    case ValueRule::kAny:
      return true;
    case ValueRule::kBinary:
      return are_bools(array.data(), array.num_bytes());
    case ValueRule::kRange: {
      if (rule.low.size() == 1) {
        return all_within<int64_t>(array, rule.low[0], rule.high[0]);
      }
      const int64_t* const x = array.as<int64_t>();
      for (size_t i = 0, k = 0; i < array.spec().num_elements(); ++i) {
        if (x[i] < rule.low[k] || x[i] > rule.high[k]) return false;
        if (++k == rule.low.size()) k = 0;
      }
      return true;
    }
    case ValueRule::kMagnitude: {
      const double most = rule.magnitude;
      switch (array.dtype()) {
        case DType::kFloat32:
          return all_within<float>(array, -static_cast<float>(most),
                                   static_cast<float>(most));
        case DType::kFloat64:
          return all_within<double>(array, -most, most);
        case DType::kInt64:
          return all_within<int64_t>(array, -static_cast<int64_t>(most),
                                     static_cast<int64_t>(most));
        case DType::kUint64:
          return all_within<uint64_t>(array, 0, static_cast<uint64_t>(most));
        case DType::kFloat16: {  // its largest number is 65504
          const uint16_t* const x = array.as<uint16_t>();
          int outside = 0;
          for (size_t i = 0; i < array.spec().num_elements(); ++i) {
            outside |= (x[i] & 0x7C00) == 0x7C00;
          }
          return outside == 0;
        }
        default:
          return true;
      }
    }
  }
  return true;
}

// Number i of an array whose rules are broken somewhere.
std::string number_text(const Array& array, size_t i) {
  char text[32];
  const auto print = [&](double x) { std::snprintf(text, sizeof(text), "%g", x); };
  switch (array.dtype()) {
    case DType::kFloat32:
      print(static_cast<double>(array.as<float>()[i]));
      break;
    case DType::kFloat64:
      print(array.as<double>()[i]);
      break;
    case DType::kInt64:
      return std::to_string(array.as<int64_t>()[i]);
    case DType::kUint64:
      return std::to_string(array.as<uint64_t>()[i]);
    case DType::kFloat16:
      return (array.as<uint16_t>()[i] & 0x03FF) != 0 ? "nan" : "infinite";
    default:
      return std::to_string(static_cast<int8_t>(array.data()[i]));
  }
  return text;
}

std::string allowed_text(const ValueRule& rule, size_t k) {
  if (rule.kind == ValueRule::kBinary) return "0 and 1";
  if (rule.kind == ValueRule::kRange) {
    const size_t i = rule.low.size() == 1 ? 0 : k;
    return std::to_string(rule.low[i]) + " to " + std::to_string(rule.high[i]);
  }
  char text[64];
  std::snprintf(text, sizeof(text), "finite numbers of at most %g in magnitude",
                rule.magnitude);
  return text;
}

}  // namespace

void check_values(const StreamSpec& spec, const std::vector<Array>& arrays) {
  for (size_t k = 0; k < arrays.size(); ++k) {
    const Array& array = arrays[k];
    const ValueRule& rule = spec.rules[k];
    if (keeps(rule, array)) continue;
    // Which number it is: the first whose own array breaks the rule.
    const auto per_env = array.spec().num_elements() /
                         static_cast<size_t>(std::max<int64_t>(spec.num_envs, 1));
    for (size_t i = 0; i < array.spec().num_elements(); ++i) {
      const size_t element = i % per_env;
      ValueRule own = rule;
      if (rule.low.size() > 1) {
        own.low = {rule.low[element]};
        own.high = {rule.high[element]};
      }
      const size_t size = item_size(array.dtype());
      const Array one({array.dtype(), {1}}, array.data() + i * size, array.owner());
      if (keeps(own, one)) continue;
      refuse(spec.names[k],
             number_text(array, i) + " in environment " + std::to_string(i / per_env) +
                 (per_env > 1 ? ", element " + std::to_string(element) : "") +
                 "; allowed are " + allowed_text(rule, element));
    }
  }
}

// --- Destinations --------------------------------------------------------------------

Destination expect(const std::vector<ArraySpec>& expected,
                   const std::vector<Array>& arrays, const char* what) {
  if (arrays.size() != expected.size()) {
    throw std::invalid_argument(std::to_string(arrays.size()) + " arrays for " +
                                std::to_string(expected.size()) + " expected ones");
  }
  return [&expected, &arrays, what](size_t i, const ArraySpec& spec) {
    if (i >= expected.size()) {
      refuse(what,
             "more arrays than the " + std::to_string(expected.size()) + " announced");
    }
    if (spec != expected[i]) {
      refuse(what, "array " + std::to_string(i) + " is " + spec.to_string() +
                       ", announced was " + expected[i].to_string());
    }
    return arrays[i];
  };
}

Destination accept_any(int64_t num_envs, MemoryPool& pool, std::vector<Array>* arrays) {
  return [num_envs, &pool, arrays](size_t i, const ArraySpec& spec) {
    if (spec.shape.size() == 0 || spec.shape[0] != num_envs) {
      refuse("array " + std::to_string(i),
             "is " + spec.to_string() + ", its first dimension must be " +
                 std::to_string(num_envs) + ", the number of environments");
    }
    arrays->push_back(pool.allocate(spec));
    return arrays->back();
  };
}

// --- Decoding ------------------------------------------------------------------------

namespace {

struct Tag {
  uint32_t field;
  uint32_t type;
};

// Reads the protobuf encoding of a message that a peer may have made up. It never reads
// past the innermost limit, which is what a message around it says of its length.
class Reader {
 public:
  Reader(io::ZeroCopyInputStream* in, int64_t num_bytes) : input_(in) {
    if (num_bytes < 0 || num_bytes > kMaxMessageBytes) {
      refuse("message", std::to_string(num_bytes) + " bytes, at most " +
                            std::to_string(kMaxMessageBytes) + " are allowed");
    }
    input_.PushLimit(static_cast<int>(num_bytes));
  }

  bool at_end() const { return remaining() == 0; }

  Tag tag() {
    const uint64_t tag = short_varint();
    if (tag > std::numeric_limits<uint32_t>::max() || tag >> 3 == 0) {
      throw WireError("malformed message: no field has the tag " + std::to_string(tag));
    }
    return {static_cast<uint32_t>(tag >> 3), static_cast<uint32_t>(tag & 7)};
  }

  uint64_t varint() {
    uint64_t value;
    if (!input_.ReadVarint64(&value)) ends_early();
    return value;
  }

  // The length of what follows, which is there.
  int length() {
    const uint64_t length = short_varint();
    if (length > static_cast<uint64_t>(remaining())) {
      throw WireError("malformed message: a length of " + std::to_string(length) +
                      " where " + std::to_string(remaining()) + " bytes remain");
    }
    return static_cast<int>(length);
  }

  void bytes(uint8_t* to, int size) {
    if (size > 0 && !input_.ReadRaw(to, size)) ends_early();
  }

  std::string string(int size) {
    std::string text;
    if (!input_.ReadString(&text, size)) ends_early();
    return text;
  }

  // Calls f() to read a message of `length` bytes, from start to end.
  template <typename F>
  void message(int length, const F& f) {
    const auto limit = input_.PushLimit(length);
    f();
    input_.PopLimit(limit);
  }

  // Skips a field of an unknown number.
  void skip(const Tag& tag) {
    switch (tag.type) {
      case kVarint:
        varint();
        return;
      case kFixed64:
        return skip_bytes(8);
      case kFixed32:
        return skip_bytes(4);
      case kBytes:
        return skip_bytes(length());
      default:
        throw WireError("malformed message: field " + std::to_string(tag.field) +
                        " has wire type " + std::to_string(tag.type) +
                        ", allowed are 0, 1, 2 and 5");
    }
  }

 private:
  // There is always a limit; what is read stays within it.
  int remaining() const { return input_.BytesUntilLimit(); }

  // A tag or a length. As protobuf does, takes no more bytes than 32 bits need.
  uint64_t short_varint() {
    const int begin = input_.CurrentPosition();
    const uint64_t value = varint();
    if (input_.CurrentPosition() - begin > 5) {
      throw WireError("malformed message: a tag or length of more than 5 bytes");
    }
    return value;
  }

  [[noreturn]] static void ends_early() {
    throw WireError("malformed message: it ends in the middle of a field");
  }

  void skip_bytes(int size) {
    if (!input_.Skip(size)) ends_early();
  }

  io::CodedInputStream input_;
};

// The place of an array in a message, put into words only for an error.
struct ArrayPlace {
  const char* list;
  size_t i;
  std::string operator()() const {
    return std::string(list) + "[" + std::to_string(i) + "]";
  }
};

// Each field of a known number is written in one way.
template <typename Place>
void check_type(const Tag& tag, uint32_t type, const Place& place) {
  if (tag.type != type) {
    refuse(place(), "field " + std::to_string(tag.field) + " has wire type " +
                        std::to_string(tag.type) + ", must be " + std::to_string(type));
  }
}

// Reads the bytes of array `place.i`, if a message of this dtype and shape may be so
// long and its destination takes it.
void read_data(Reader& reader, const ArraySpec& spec, int length,
               const Destination& destination, const ArrayPlace& place) {
  if (!fits_message(spec)) refuse(place(), too_large(spec));
  const size_t size = spec.num_bytes();
  if (static_cast<size_t>(length) != size) {
    refuse(place(), spec.to_string() + " has " + std::to_string(length) +
                        " bytes of data, must have " + std::to_string(size));
  }
  if (!destination) refuse(place(), "no arrays are expected here");
  const Array array = destination(place.i, spec);
  if (array.spec() != spec || (size > 0 && array.data() == nullptr)) {
    throw std::logic_error(place() + ": " + spec.to_string() + " was to be put into " +
                           array.spec().to_string());
  }
  reader.bytes(array.data(), length);
  if (spec.dtype == DType::kBool && !are_bools(array.data(), size)) {
    refuse(place(), "a bool that is neither 0 nor 1");
  }
}

void read_array(Reader& reader, const Destination& destination,
                const ArrayPlace& place) {
  ArraySpec spec;
  uint32_t last = 0;  // field
  const auto next = [&](const Tag& tag) {
    if (tag.field < last || (tag.field == last && tag.field != kShapeField)) {
      refuse(place(),
             "dtype, shape and data must come in this order, dtype and data once");
    }
    if (last == 0 && tag.field != kDTypeField) refuse(place(), "dtype is missing");
    last = tag.field;
  };
  const auto dim = [&] {
    add_dim(&spec.shape, reader.varint(), Shape::kMaxDims, place);
  };
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    switch (tag.field) {
      case kDTypeField: {
        next(tag);
        check_type(tag, kVarint, place);
        spec.dtype = checked_dtype(reader.varint(), place);
        break;
      }
      case kShapeField:
        next(tag);
        if (tag.type == kVarint) {
          dim();
        } else {
          check_type(tag, kBytes, place);
          reader.message(reader.length(), [&] {
            while (!reader.at_end()) dim();
          });
        }
        break;
      case kDataField:
        next(tag);
        check_type(tag, kBytes, place);
        read_data(reader, spec, reader.length(), destination, place);
        break;
      default:
        reader.skip(tag);
    }
  }
  if (last == 0) refuse(place(), "dtype is missing");
  // Protobuf leaves empty bytes out.
  if (last != kDataField) read_data(reader, spec, 0, destination, place);
}

// A repeated field of arrays, and how many came.
struct ArrayList {
  const char* name;
  const Destination& destination;
  size_t count = 0;
};

// Reads a message whose fields 1 to N are lists of arrays, and field N + 1, if there is
// one, a number.
template <size_t N>
void read_arrays(Reader& reader, ArrayList (&lists)[N], uint64_t* number = nullptr) {
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    if (tag.field == N + 1 && number != nullptr) {
      check_type(tag, kVarint, [] { return std::string("step"); });
      *number = reader.varint();
      continue;
    }
    if (tag.field > N) {
      reader.skip(tag);
      continue;
    }
    ArrayList& list = lists[tag.field - 1];
    const ArrayPlace place{list.name, list.count};
    check_type(tag, kBytes, place);
    if (list.count == static_cast<size_t>(kMaxArrays)) {
      refuse(place(), "more than " + std::to_string(kMaxArrays) +
                          " arrays, which is the most allowed");
    }
    reader.message(reader.length(),
                   [&] { read_array(reader, list.destination, place); });
    ++list.count;
  }
}

// Has protobuf parse a small message.
void parse(Reader& reader, int length, int64_t max_length, const char* place,
           MessageLite* message) {
  if (length > max_length) {
    refuse(place, std::to_string(length) + " bytes, at most " +
                      std::to_string(max_length) + " are allowed");
  }
  const std::string bytes = reader.string(length);
  io::CodedInputStream input(reinterpret_cast<const uint8_t*>(bytes.data()), length);
  // A level of Space is a Space and its kind. Some more, so that SpaceReader can say
  // what is wrong with a space that is somewhat too deep.
  input.SetRecursionLimit(4 * kMaxDepth);
  if (!message->ParseFromCodedStream(&input) || !input.ConsumedEntireMessage()) {
    refuse(place,
           "can't be parsed: malformed, nested too deep, or with a text that is "
           "not UTF-8");
  }
}

// Reads an EnvMessage or AgentMessage: one of the fields 1 to `num_kinds`, with
// read_kind(field, length).
template <typename ReadKind>
void read_message(Reader& reader, uint32_t num_kinds, const char* kinds,
                  const ReadKind& read_kind) {
  const auto place = [] { return std::string("message"); };
  bool has_kind = false;
  while (!reader.at_end()) {
    const Tag tag = reader.tag();
    if (tag.field > num_kinds) {
      reader.skip(tag);
      continue;
    }
    check_type(tag, kBytes, place);
    if (has_kind) refuse(place(), std::string("more than one of ") + kinds);
    has_kind = true;
    read_kind(tag.field, reader.length());
  }
  if (!has_kind) refuse(place(), std::string("none of ") + kinds);
}

}  // namespace

Decoded decode_env_message(io::ZeroCopyInputStream* in, int64_t num_bytes,
                           const Destination& arrays,
                           const Destination& final_observation) {
  Reader reader(in, num_bytes);
  Decoded result;
  const auto read_kind = [&](uint32_t field, int length) {
    if (field == kHelloField) {
      result.kind = Decoded::kHello;
      parse(reader, length, kMaxHelloBytes, "hello", &result.env_hello);
    } else if (field == kStepField) {
      result.kind = Decoded::kStep;
      ArrayList lists[] = {{"step.arrays", arrays},
                           {"step.final_observation", final_observation}};
      reader.message(length,
                     [&] { read_arrays(reader, lists, &result.env_nanoseconds); });
      result.num_arrays = lists[0].count;
      result.num_final_arrays = lists[1].count;
    } else {
      result.kind = Decoded::kError;
      wire::EnvError error;
      parse(reader, length, kMaxErrorBytes, "error", &error);
      result.error = std::move(*error.mutable_message());
    }
  };
  read_message(reader, kErrorField, "hello, step and error", read_kind);
  return result;
}

Decoded decode_agent_message(io::ZeroCopyInputStream* in, int64_t num_bytes,
                             const Destination& arrays) {
  Reader reader(in, num_bytes);
  Decoded result;
  const auto read_kind = [&](uint32_t field, int length) {
    if (field == kHelloField) {
      result.kind = Decoded::kHello;
      parse(reader, length, kMaxHelloBytes, "hello", &result.agent_hello);
    } else {
      result.kind = Decoded::kAction;
      ArrayList lists[] = {{"action.arrays", arrays}};
      reader.message(length, [&] { read_arrays(reader, lists); });
      result.num_arrays = lists[0].count;
    }
  };
  read_message(reader, kActionField, "hello and action", read_kind);
  return result;
}

namespace {

void check_valid(const grpc::ByteBuffer& message) {
  if (!message.Valid()) throw WireError("message: no bytes at all");
}

}  // namespace

Decoded decode_env_message(grpc::ByteBuffer* message, const Destination& arrays,
                           const Destination& final_observation) {
  check_valid(*message);
  grpc::ProtoBufferReader in(message);
  return decode_env_message(&in, static_cast<int64_t>(message->Length()), arrays,
                            final_observation);
}

Decoded decode_agent_message(grpc::ByteBuffer* message, const Destination& arrays) {
  check_valid(*message);
  grpc::ProtoBufferReader in(message);
  return decode_agent_message(&in, static_cast<int64_t>(message->Length()), arrays);
}

// --- Encoding ------------------------------------------------------------------------

namespace {

class Writer {
 public:
  explicit Writer(uint8_t* to) : to_(to) {}

  const uint8_t* position() const { return to_; }

  void varint(uint64_t value) {
    to_ = io::CodedOutputStream::WriteVarint64ToArray(value, to_);
  }

  // The start of a field that holds `size` bytes.
  void header(uint32_t field, size_t size) {
    varint(field << 3 | kBytes);
    varint(size);
  }

  void number(uint32_t field, uint64_t value) {
    varint(field << 3 | kVarint);
    varint(value);
  }

  void array(uint32_t field, const Array& array) {
    header(field, array_bytes(array.spec()));
    number(kDTypeField, static_cast<uint64_t>(array.dtype()));
    if (array.shape().size() > 0) {
      header(kShapeField, packed_bytes(array.shape()));
      for (int64_t dim : array.shape()) varint(static_cast<uint64_t>(dim));
    }
    const size_t size = array.num_bytes();
    if (size > 0) {
      header(kDataField, size);
      std::memcpy(to_, array.data(), size);
      to_ += size;
    }
  }

 private:
  uint8_t* to_;
};

// A buffer of these bytes of `block`, which it keeps as long as the transport needs it.
grpc::ByteBuffer share(const Array& block, uint8_t* data, size_t size) {
  struct Owner {
    std::shared_ptr<void> block;
    // The transport's threads take turns by its own locks, which ThreadSanitizer does
    // not see.
    std::atomic<bool> given{false};
  };
  auto owner = std::make_unique<Owner>();
  owner->block = block.owner();
  owner->given.store(true, std::memory_order_release);
  const auto let_go = [](void* pointer) {
    const std::unique_ptr<Owner> owner(static_cast<Owner*>(pointer));
    static_cast<void>(owner->given.load(std::memory_order_acquire));
  };
  const grpc::Slice slice(data, size, let_go, owner.release());
  return grpc::ByteBuffer(&slice, 1);
}

// A message whose field `kind` has `arrays` as field 1, `final_observation` as field 2,
// `env_nanoseconds` as field 3.
grpc::ByteBuffer encode_arrays(uint32_t kind, const std::vector<Array>& arrays,
                               const std::vector<Array>& final_observation,
                               uint64_t env_nanoseconds, MemoryPool& pool,
                               const char* what) {
  for (const auto* list : {&arrays, &final_observation}) {
    for (const Array& array : *list) {
      if (array.data() == nullptr && array.num_bytes() > 0) {
        throw std::invalid_argument(std::string(what) + ": an array of " +
                                    array.spec().to_string() + " has no memory");
      }
    }
  }
  const MessageSize size =
      checked_message_size(arrays, final_observation, env_nanoseconds, what);
  // The message begins in the block where its largest array comes to lie on a cache
  // line of its own: copying it then takes a sixth less time.
  constexpr size_t kLine = 64;
  const auto room = static_cast<int64_t>(size.total() + kLine);
  const Array block = pool.allocate({DType::kUint8, {room}});
  uint8_t* begin = block.data();
  const auto largest =
      reinterpret_cast<uintptr_t>(begin) + size.header() + size.largest_begin;
  begin += (kLine - largest % kLine) % kLine;
  Writer writer(begin);
  writer.header(kind, size.body);
  for (const Array& array : arrays) writer.array(kArraysField, array);
  for (const Array& array : final_observation) {
    writer.array(kFinalObservationField, array);
  }
  if (env_nanoseconds != 0) writer.number(kEnvNanosecondsField, env_nanoseconds);
  if (writer.position() != begin + size.total()) {
    throw std::logic_error("a message's size was computed wrongly");
  }
  return share(block, begin, size.total());
}

grpc::ByteBuffer serialize(const MessageLite& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

void check_hello_size(const MessageLite& hello) {
  const size_t size = hello.ByteSizeLong();
  if (size > static_cast<size_t>(kMaxHelloBytes)) {
    refuse("hello", std::to_string(size) + " bytes, at most " +
                        std::to_string(kMaxHelloBytes) +
                        " are allowed; give one bound for a whole Box where all "
                        "elements have the same");
  }
}

}  // namespace

grpc::ByteBuffer encode_step(const std::vector<Array>& arrays,
                             const std::vector<Array>& final_observation,
                             MemoryPool& pool, uint64_t env_nanoseconds) {
  return encode_arrays(kStepField, arrays, final_observation, env_nanoseconds, pool,
                       "a step");
}

grpc::ByteBuffer encode_action(const std::vector<Array>& arrays, MemoryPool& pool) {
  return encode_arrays(kActionField, arrays, {}, 0, pool, "an action");
}

grpc::ByteBuffer encode_error(const std::string& text) {
  // A traceback is told by its beginning and its end.
  constexpr size_t kMaxHalf = 32 << 10;
  wire::EnvMessage message;
  std::string* short_text = message.mutable_error()->mutable_message();
  if (text.size() <= 2 * kMaxHalf) {
    *short_text = to_utf8(text);
  } else {
    *short_text = to_utf8(text.substr(0, kMaxHalf)) + "\n[...]\n" +
                  to_utf8(text.substr(text.size() - kMaxHalf));
  }
  return serialize(message);
}

grpc::ByteBuffer encode(const wire::EnvMessage& message) {
  if (message.has_error()) return encode_error(message.error().message());
  if (!message.has_hello()) {
    throw std::invalid_argument("only hello and error are encoded from an EnvMessage");
  }
  check_hello_size(message.hello());
  return serialize(message);
}

grpc::ByteBuffer encode(const wire::AgentMessage& message) {
  if (!message.has_hello()) {
    throw std::invalid_argument("only hello is encoded from an AgentMessage");
  }
  check_hello_size(message.hello());
  return serialize(message);
}

}  // namespace torchbeast
