#include "stream_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "text.h"

namespace torchbeast {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

static_assert(static_cast<int>(wire::BOOL) == static_cast<int>(DType::kBool) &&
                  static_cast<int>(wire::FLOAT64) == static_cast<int>(DType::kFloat64),
              "DType has the wire's numbers");

// "hello: 1025 settings, at most 1024 are allowed".
void check_most(const std::string& place, uint64_t number, const std::string& unit,
                int64_t most) {
  if (number <= static_cast<uint64_t>(most)) return;
  refuse(place, std::to_string(number) + " " + unit + ", at most " +
                    std::to_string(most) + " are allowed");
}

// A peer's name, for errors, which make it printable: at most 64 bytes, on one line.
std::string quoted(const std::string& name) {
  std::string text = first_bytes(name, 64);
  std::replace(text.begin(), text.end(), '\n', '?');
  return '"' + text + (text.size() < name.size() ? "...\"" : "\"");
}

void check_length(const std::string& text, const std::string& place) {
  check_most(place, text.size(), "bytes in " + quoted(text), kMaxNameBytes);
}

// --- Shapes --------------------------------------------------------------------------

DType checked_dtype(wire::DType dtype, const std::string& place) {
  if (dtype < 0 || !is_dtype(static_cast<uint64_t>(dtype))) {
    refuse(place, "no such dtype: " + std::to_string(dtype) + ", allowed are 1 to 12");
  }
  return static_cast<DType>(dtype);
}

Shape checked_shape(const google::protobuf::RepeatedField<uint64_t>& dims,
                    const std::string& place) {
  check_most(place, static_cast<size_t>(dims.size()), "dimensions", kMaxSpaceDims);
  Shape shape;
  for (uint64_t dim : dims) {
    check_most(place, dim, "elements in a dimension", kMaxMessageBytes);
    shape.push_back(static_cast<int64_t>(dim));
  }
  return shape;
}

// The array that `num_envs` arrays make together, which fits into a message. A
// dimension of 0 counts as 1, because NumPy, too, refuses arrays whose other dimensions
// multiply to too much.
ArraySpec batched(const ArraySpec& one, int64_t num_envs, const std::string& place) {
  const ArraySpec spec{one.dtype, one.shape.behind({num_envs})};
  uint64_t bytes = item_size(spec.dtype);
  bool overflows = false;
  for (int64_t dim : spec.shape) {
    overflows |= __builtin_mul_overflow(
        bytes, static_cast<uint64_t>(std::max<int64_t>(dim, 1)), &bytes);
  }
  if (overflows || bytes > static_cast<uint64_t>(kMaxMessageBytes)) {
    refuse(place, spec.to_string() + " is larger than a message may be, " +
                      std::to_string(kMaxMessageBytes) + " bytes");
  }
  return spec;
}

// --- Spaces --------------------------------------------------------------------------

// The smallest and largest number of a dtype. Of 64 bits, the largest is rounded up.
std::pair<double, double> range_of(DType dtype) {
  constexpr double kMax = std::numeric_limits<double>::max();
  if (is_float(dtype)) return {-kMax, kMax};
  if (dtype == DType::kBool) return {0, 1};
  const bool is_signed = dtype == DType::kInt8 || dtype == DType::kInt16 ||
                         dtype == DType::kInt32 || dtype == DType::kInt64;
  const int bits = 8 * static_cast<int>(item_size(dtype)) - (is_signed ? 1 : 0);
  return {is_signed ? -std::ldexp(1, bits) : 0, std::ldexp(1, bits) - 1};
}

// Every number that the learner, which computes in float32, can hold.
ValueRule finite() {
  constexpr double kMaxFloat = std::numeric_limits<float>::max();
  return {{-kMaxFloat}, {kMaxFloat}};
}

// How large a space may be, and whether its integers count from 0.
struct Limits {
  int64_t elements, choices;
  bool is_action;
};
constexpr Limits kObservation{kMaxElements, kMaxChoices, false};
constexpr Limits kAction{kMaxActionNumbers, kMaxActionNumbers, true};

// Reads one space; throws WireError, naming the place, if it breaks a rule. One thread
// at a time.
class SpaceReader {
 public:
  SpaceReader(int64_t num_envs, const Limits& limits)
      : num_envs_(num_envs), limits_(limits) {}

  // Of the arrays that have been read, in their order.
  std::vector<std::string> names;
  std::vector<ValueRule> rules;

  SpecNest read(const wire::Space& space, const std::string& place, int level) {
    check_most(place, static_cast<size_t>(level), "levels of spaces", kMaxDepth);
    switch (space.kind_case()) {
      case wire::Space::kBox:
        return read_box(space.box(), place);
      case wire::Space::kDiscrete:
        return read_choices({space.discrete().n()}, {space.discrete().start()}, false,
                            place);
      case wire::Space::kMultiDiscrete:
        return read_multi_discrete(space.multi_discrete(), place);
      case wire::Space::kMultiBinary:
        return leaf({DType::kInt8, checked_shape(space.multi_binary().shape(), place)},
                    {{0}, {1}}, place);
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
  void count_array(const std::string& place) {
    check_most(place, ++num_arrays_, "arrays", kMaxArrays);
  }

  SpecNest leaf(const ArraySpec& one, ValueRule rule, const std::string& place) {
    count_array(place);
    const ArraySpec spec = batched(one, num_envs_, place);
    num_elements_ += one.num_elements();
    check_most(place, num_elements_, "elements or more in the space", limits_.elements);
    names.push_back(place);
    rules.push_back(std::move(rule));
    return SpecNest(spec);
  }

  SpecNest read_box(const wire::Space::Box& box, const std::string& place) {
    const ArraySpec one{checked_dtype(box.dtype(), place),
                        checked_shape(box.shape(), place)};
    batched(one, num_envs_, place);  // not too large to be counted
    const auto size = static_cast<int64_t>(one.num_elements());
    for (const auto& [name, count] :
         {std::pair("low", box.low_size()), std::pair("high", box.high_size())}) {
      if (count > 1 && count != size) {
        refuse(place, "Box with " + std::to_string(count) + " values in " + name +
                          "; allowed are 0, 1 or " + std::to_string(size) +
                          ", the number of elements");
      }
    }
    const auto [lowest, highest] = range_of(one.dtype);
    for (int i = 0; i < std::max(box.low_size(), box.high_size()); ++i) {
      const auto bound = [i](const auto& values, double none) {
        return values.empty() ? none : values.Get(values.size() == 1 ? 0 : i);
      };
      const double low = bound(box.low(), -kInfinity);
      const double high = bound(box.high(), kInfinity);
      const bool is_low = low == -kInfinity || (low >= lowest && low <= highest);
      const bool is_high = high == kInfinity || (high >= lowest && high <= highest);
      if (is_low && is_high && low <= high) continue;  // neither is NaN
      refuse(place, "Box with bounds " + std::to_string(low) + " to " +
                        std::to_string(high) + " of element " + std::to_string(i) +
                        "; low must be at most high, and numbers of " +
                        dtype_name(one.dtype) + " or infinite");
    }
    return leaf(one, is_float(one.dtype) ? finite() : ValueRule(), place);
  }

  // Of Discrete and MultiDiscrete.
  SpecNest read_choices(const std::vector<int64_t>& n,
                        const std::vector<int64_t>& start, bool is_multi,
                        const std::string& place) {
    ValueRule rule;
    for (size_t i = 0; i < n.size(); ++i) {
      const std::string at = is_multi ? place + "[" + std::to_string(i) + "]" : place;
      const std::string number = std::to_string(n[i]);
      if (n[i] < 1) refuse(at, "n is " + number + ", must be 1 or more");
      if (n[i] > limits_.choices - num_choices_) {
        refuse(at, "n is " + number +
                       ", and all n of a space together may be at most " +
                       std::to_string(limits_.choices));
      }
      num_choices_ += n[i];
      if (start[i] < -kMaxStep || start[i] > kMaxStep - n[i] + 1) {
        refuse(at, "start " + std::to_string(start[i]) + " and n " + number +
                       " exceed -2^53 to 2^53");
      }
      const int64_t low = limits_.is_action ? 0 : start[i];
      rule.low.push_back(static_cast<double>(low));
      rule.high.push_back(static_cast<double>(low + n[i] - 1));
    }
    Shape shape;
    if (is_multi) shape.push_back(static_cast<int64_t>(n.size()));
    return leaf({DType::kInt64, shape}, std::move(rule), place);
  }

  SpecNest read_multi_discrete(const wire::Space::MultiDiscrete& space,
                               const std::string& place) {
    if (space.n_size() == 0) refuse(place, "MultiDiscrete without n");
    if (space.start_size() != 0 && space.start_size() != space.n_size()) {
      refuse(place, "MultiDiscrete with " + std::to_string(space.start_size()) +
                        " values in start; allowed are 0 or " +
                        std::to_string(space.n_size()) + ", as many as in n");
    }
    std::vector<int64_t> start(space.start().begin(), space.start().end());
    start.resize(static_cast<size_t>(space.n_size()), 0);
    return read_choices({space.n().begin(), space.n().end()}, start, true, place);
  }

  SpecNest read_tuple(const wire::Space::Tuple& tuple, const std::string& place,
                      int level) {
    if (tuple.items_size() == 0) count_array(place);
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
    if (dict.keys_size() == 0) count_array(place);
    std::map<std::string, const wire::Space*> values;  // in the order of the arrays
    for (int i = 0; i < dict.keys_size(); ++i) {
      const std::string& key = dict.keys(i);
      check_length(key, place);
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
  const Limits limits_;
  uint64_t num_arrays_ = 0;
  uint64_t num_elements_ = 0;
  int64_t num_choices_ = 0;
};

// --- Hellos --------------------------------------------------------------------------

void check_settings(const wire::EnvHello& hello) {
  check_most("hello", static_cast<size_t>(hello.settings_size()), "settings",
             kMaxSettings);
  std::set<std::string> names;
  for (const wire::Setting& setting : hello.settings()) {
    const std::string place = "setting " + quoted(setting.name());
    check_length(setting.name(), "setting");
    check_length(setting.value(), place);
    if (setting.name().empty()) refuse(place, "the name is empty");
    if (!names.insert(setting.name()).second) refuse(place, "the name comes twice");
  }
}

}  // namespace

void refuse(const std::string& place, const std::string& why) {
  throw WireError(place + ": " + why);
}

StreamSpec::StreamSpec(const wire::EnvHello& hello) : num_envs(hello.num_envs()) {
  check_length(hello.environment(), "hello.environment");
  check_most("hello.stream_id", hello.stream_id().size(), "bytes", kMaxStreamIdBytes);
  check_most("hello.first_step", hello.first_step(), "steps",
             std::numeric_limits<int64_t>::max());
  if (num_envs < 1 || num_envs > kMaxEnvs) {
    refuse("hello", "num_envs is " + std::to_string(num_envs) + ", allowed are 1 to " +
                        std::to_string(kMaxEnvs));
  }
  check_settings(hello);

  SpaceReader observations(num_envs, kObservation), actions(num_envs, kAction);
  observation = observations.read(hello.observation_space(), "observation", 1);
  has_action_space = hello.has_action_space();
  if (has_action_space) action = actions.read(hello.action_space(), "action", 1);
  arrays = observation.flatten();
  num_observation_arrays = arrays.size();
  names = std::move(observations.names);
  rules = std::move(observations.rules);
  const auto add = [this](const std::string& name, const ArraySpec& spec,
                          ValueRule rule) {
    names.push_back(name);
    arrays.push_back(spec);
    rules.push_back(std::move(rule));
  };
  const ValueRule any;
  const ValueRule count{{0}, {static_cast<double>(kMaxStep)}};
  add("reward", {DType::kFloat32, {num_envs}}, finite());
  add("done", {DType::kBool, {num_envs}}, any);
  add("episode_step", {DType::kInt64, {num_envs}}, count);
  add("episode_return", {DType::kFloat32, {num_envs}}, finite());

  // Extra fields that have a meaning: one environment's array, and its values.
  std::map<std::string, std::pair<ArraySpec, ValueRule>> known = {
      {"truncated", {{DType::kBool, {}}, any}},
      {"game_over", {{DType::kBool, {}}, any}},
      {"game_step", {{DType::kInt64, {}}, count}},
      {"game_return", {{DType::kFloat32, {}}, finite()}}};
  if (has_action_space && action.is_leaf()) {
    const auto& [dtype, shape] = action.leaf();
    known["last_action"] = {{dtype, shape.tail()},
                            is_float(dtype) ? finite() : actions.rules[0]};
  }
  std::set<std::string> taken = {"observation", "reward", "done", "episode_step",
                                 "episode_return"};
  check_most("hello", static_cast<uint64_t>(hello.extra_fields_size()), "extra fields",
             kMaxArrays);
  for (const wire::Field& field : hello.extra_fields()) {
    const std::string& name = field.name();
    const std::string place = "extra field " + quoted(name);
    check_length(name, "extra field");
    if (name.empty()) refuse(place, "the name is empty");
    if (!taken.insert(name).second) refuse(place, "the name is taken");
    const ArraySpec one{checked_dtype(field.dtype(), place),
                        checked_shape(field.shape(), place)};
    const auto found = known.find(name);
    const bool is_known = found != known.end();
    if (is_known && one != found->second.first) {
      refuse(place,
             "is " + one.to_string() + ", must be " + found->second.first.to_string());
    }
    if (name == "truncated") truncated = arrays.size();
    if (name == "game_over") game_over = arrays.size();
    add(name, batched(one, num_envs, place), is_known ? found->second.second : any);
  }

  check_most("hello", arrays.size(), "arrays per step", kMaxArrays);
  // The largest messages: what they hold besides the arrays takes less than 64 bytes.
  for (size_t i = 0; i < arrays.size(); ++i) {
    step_bytes += arrays[i].num_bytes();
    if (i < num_observation_arrays) observation_bytes += arrays[i].num_bytes();
  }
  action.for_each([&](const ArraySpec& spec) { action_bytes += spec.num_bytes(); });
  const std::string nothing = "the space has no array with an element";
  if (observation_bytes == 0) refuse("observation", nothing);
  if (has_action_space && action_bytes == 0) refuse("action", nothing);
  const size_t final_bytes = truncated ? observation_bytes : 0;
  for (const auto& [what, bytes] : {std::pair("a step", step_bytes + final_bytes),
                                    std::pair("an action", action_bytes)}) {
    check_most("hello", bytes + 64,
               std::string("bytes in ") + what + " of " + std::to_string(num_envs) +
                   " environments",
               kMaxMessageBytes);
  }
}

ArraySpec layout_spec(const wire::Field& layout, int64_t num_envs) {
  const std::string place = "action.layout";
  return batched(
      {checked_dtype(layout.dtype(), place), checked_shape(layout.shape(), place)},
      num_envs, place);
}

}  // namespace torchbeast
