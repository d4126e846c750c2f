// What hellos may announce, and which values steps may have.

#include "stream_spec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "test_util.h"

namespace torchbeast {
namespace {

wire::Space box(wire::DType dtype, const std::vector<uint64_t>& shape) {
  wire::Space space;
  space.mutable_box()->set_dtype(dtype);
  for (uint64_t dim : shape) space.mutable_box()->add_shape(dim);
  return space;
}

wire::Space discrete(int64_t n, int64_t start = 0) {
  wire::Space space;
  space.mutable_discrete()->set_n(n);
  space.mutable_discrete()->set_start(start);
  return space;
}

wire::Space dict(const std::vector<std::pair<std::string, wire::Space>>& items) {
  wire::Space space;
  for (const auto& [key, value] : items) {
    space.mutable_dict()->add_keys(key);
    *space.mutable_dict()->add_values() = value;
  }
  if (items.empty()) space.mutable_dict();
  return space;
}

wire::Space tuple(const std::vector<wire::Space>& items) {
  wire::Space space;
  space.mutable_tuple();
  for (const wire::Space& item : items) *space.mutable_tuple()->add_items() = item;
  return space;
}

wire::EnvHello hello_of(const wire::Space& observation, uint32_t num_envs = 3) {
  wire::EnvHello hello;
  hello.set_version(kWireVersion);
  hello.set_environment("Mock-v0");
  hello.set_num_envs(num_envs);
  *hello.mutable_observation_space() = observation;
  *hello.mutable_action_space() = discrete(2);
  return hello;
}

// Why a hello with this observation space is refused.
std::string space_refusal(const wire::Space& observation) {
  return refusal([&] { StreamSpec{hello_of(observation)}; });
}

wire::Field* add_field(wire::EnvHello* hello, const std::string& name,
                       wire::DType dtype, const std::vector<uint64_t>& shape) {
  wire::Field* field = hello->add_extra_fields();
  field->set_name(name);
  field->set_dtype(dtype);
  for (uint64_t dim : shape) field->add_shape(dim);
  return field;
}

void add_setting(wire::EnvHello* hello, const std::string& name,
                 const std::string& value) {
  wire::Setting* setting = hello->add_settings();
  setting->set_name(name);
  setting->set_value(value);
}

TEST(Text, OnlyCharactersOfUtf8ArePrintable) {
  EXPECT_EQ(printable("\xF4\x8F\xBF\xBF"), "\xF4\x8F\xBF\xBF");
  for (const std::string first : {"\xF5", "\xF8", "\xFC"}) {
    EXPECT_EQ(printable(first + "\x80\x80\x80").find(first), std::string::npos);
  }
  EXPECT_EQ(printable("a\n\x1b[2J"), "a\n  | \\x1b[2J");
}

// --- What a hello announces ----------------------------------------------------------

TEST(StreamSpecTest, ListsAStepsArraysInOrder) {
  wire::EnvHello hello = hello_of(dict({
      {"map", box(wire::UINT8, {5, 7, 2})},  // the last key
      {"", discrete(4, -2)},                 // the first
      {"\xC3\xA9", box(wire::FLOAT16, {})},  // behind ASCII
      {"inner", tuple({dict({{"b", box(wire::FLOAT64, {2})}, {"a", discrete(1)}}),
                       tuple({}), box(wire::BOOL, {0, 3})})},
  }));
  wire::Space action = tuple({discrete(7), wire::Space()});
  for (int64_t n : {2, 5})
    action.mutable_tuple()->mutable_items(1)->mutable_multi_discrete()->add_n(n);
  *hello.mutable_action_space() = action;
  add_field(&hello, "truncated", wire::BOOL, {});
  add_field(&hello, "lives", wire::INT32, {4});

  const StreamSpec spec(hello);
  EXPECT_EQ(spec.num_envs, 3);
  std::vector<std::string> arrays;
  for (const ArraySpec& array : spec.arrays) arrays.push_back(array.to_string());
  EXPECT_EQ(arrays, (std::vector<std::string>{
                        "int64 [3]",           // [""]
                        "int64 [3]",           // ["inner"][0]["a"]
                        "float64 [3, 2]",      // ["inner"][0]["b"]
                        "bool [3, 0, 3]",      // ["inner"][2]
                        "uint8 [3, 5, 7, 2]",  // ["map"]
                        "float16 [3]",         // ["é"]
                        "float32 [3]", "bool [3]", "int64 [3]", "float32 [3]",
                        "bool [3]",      // truncated
                        "int32 [3, 4]",  // lives
                    }));
  EXPECT_EQ(spec.num_observation_arrays, 6u);
  EXPECT_EQ(std::vector<std::string>(spec.names.begin() + 6, spec.names.end()),
            (std::vector<std::string>{"reward", "done", "episode_step",
                                      "episode_return", "truncated", "lives"}));
  EXPECT_EQ(
      spec.observation.dict().at("inner").vector()[0].dict().at("b").leaf().to_string(),
      "float64 [3, 2]");
  EXPECT_EQ(spec.action.vector()[0].leaf().to_string(), "int64 [3]");
  EXPECT_EQ(spec.action.vector()[1].leaf().to_string(), "int64 [3, 2]");
}

TEST(StreamSpecTest, SettingsKeepTheRules) {
  const auto reason = [](const std::string& name, const std::string& value, int times) {
    wire::EnvHello hello = hello_of(discrete(7));
    for (int i = 0; i < times; ++i) {
      add_setting(&hello, name + (i > 1 ? std::to_string(i) : ""), value);
    }
    return refusal([&] { const StreamSpec spec(hello); });
  };
  EXPECT_EQ(reason("a", "", 1), "accepted");
  EXPECT_NE(reason("a", "", 2).find("the name comes twice"), std::string::npos);
  EXPECT_NE(reason("", "1", 1).find("the name is empty"), std::string::npos);
  EXPECT_EQ(reason("a", std::string(1024, 'x'), 1), "accepted");
  EXPECT_EQ(reason("a", std::string(1025, 'x'), 1),
            "setting \"a\": 1025 bytes in \"" + std::string(64, 'x') +
                "...\", at most 1024 are allowed");
  EXPECT_EQ(reason("a", "1", 1025), "hello: 1025 settings, at most 1024 are allowed");
}

TEST(StreamSpecTest, RefusesWithAReason) {
  const auto reason = [](const std::function<void(wire::EnvHello*)>& change) {
    wire::EnvHello hello = hello_of(box(wire::UINT8, {5, 7}));
    change(&hello);
    return refusal([&] { const StreamSpec spec(hello); });
  };
  EXPECT_EQ(reason([](auto*) {}), "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->clear_action_space(); }), "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_num_envs(0); }),
            "hello: num_envs is 0, allowed are 1 to 16384");
  EXPECT_EQ(reason([](auto* hello) { hello->set_num_envs(16385); }),
            "hello: num_envs is 16385, allowed are 1 to 16384");
  EXPECT_EQ(reason([](auto* hello) { hello->set_num_envs(16384); }), "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_environment(std::string(1024, 'x')); }),
            "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_environment(std::string(1025, 'x')); }),
            "hello.environment: 1025 bytes in \"" + std::string(64, 'x') +
                "...\", at most 1024 are allowed");
  // A long name is cut between characters, and stays on one line.
  EXPECT_EQ(reason([](auto* hello) {
              std::string name = "\n" + std::string(62, 'x');
              while (name.size() <= 1024) name += "\xC3\xA9";
              hello->set_environment(name);
            }),
            "hello.environment: 1025 bytes in \"?" + std::string(62, 'x') +
                "...\", at most 1024 are allowed");
  EXPECT_EQ(reason([](auto* hello) { hello->set_stream_id(std::string(64, '\0')); }),
            "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_stream_id(std::string(65, 'x')); }),
            "hello.stream_id: 65 bytes, at most 64 are allowed");
  EXPECT_EQ(reason([](auto* hello) { hello->set_first_step((uint64_t{1} << 63) - 1); }),
            "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_first_step(uint64_t{1} << 63); }),
            "hello.first_step: 9223372036854775808 steps, at most 9223372036854775807 "
            "are allowed");
  EXPECT_EQ(reason([](auto* hello) { hello->clear_observation_space(); }),
            "observation: a space without a kind; allowed are box, discrete, "
            "multi_discrete, multi_binary, tuple and dict");
  EXPECT_EQ(reason([](auto* hello) {
              *hello->mutable_action_space() = tuple({discrete(2), wire::Space()});
            }),
            "action[1]: a space without a kind; allowed are box, discrete, "
            "multi_discrete, multi_binary, tuple and dict");

  const auto field = [&](const std::string& name, wire::DType dtype,
                         const std::vector<uint64_t>& shape) {
    return reason([&](auto* hello) {
      add_field(hello, "lives", wire::INT32, {});
      add_field(hello, name, dtype, shape);
    });
  };
  EXPECT_EQ(field("count", wire::INT8, {1, 2, 3, 4, 5, 6}), "accepted");
  EXPECT_EQ(field("count", wire::INT8, {1, 2, 3, 4, 5, 6, 7}),
            "extra field \"count\": 7 dimensions, at most 6 are allowed");
  EXPECT_EQ(field("count", wire::DTYPE_UNSPECIFIED, {}),
            "extra field \"count\": no such dtype: 0, allowed are 1 to 12");
  EXPECT_EQ(field("count", static_cast<wire::DType>(-1), {}),
            "extra field \"count\": no such dtype: -1, allowed are 1 to 12");
  EXPECT_EQ(field("", wire::INT8, {}), "extra field \"\": the name is empty");
  EXPECT_EQ(field("lives", wire::INT8, {}), "extra field \"lives\": the name is taken");
  for (const std::string name :
       {"observation", "reward", "done", "episode_step", "episode_return"}) {
    EXPECT_EQ(field(name, wire::INT8, {}),
              "extra field \"" + name + "\": the name is taken");
  }
  EXPECT_EQ(reason([](auto* hello) {
              for (int i = 0; i < 1020; ++i) {
                add_field(hello, std::to_string(i), wire::BOOL, {});
              }
            }),
            "hello: 1025 arrays per step, at most 1024 are allowed");
  EXPECT_EQ(field("truncated", wire::BOOL, {}), "accepted");
  EXPECT_EQ(field("truncated", wire::UINT8, {}),
            "extra field \"truncated\": is uint8 [], must be bool []");
  EXPECT_EQ(field("game_step", wire::INT32, {}),
            "extra field \"game_step\": is int32 [], must be int64 []");
  EXPECT_EQ(field("game_return", wire::FLOAT64, {}),
            "extra field \"game_return\": is float64 [], must be float32 []");
  EXPECT_EQ(field("game_over", wire::UINT8, {}),
            "extra field \"game_over\": is uint8 [], must be bool []");
  EXPECT_EQ(reason([](auto* hello) {
              *hello->mutable_action_space() = box(wire::FLOAT32, {2});
              add_field(hello, "last_action", wire::FLOAT32, {3});
            }),
            "extra field \"last_action\": is float32 [3], must be float32 [2]");
  EXPECT_EQ(field("truncated", wire::BOOL, {1}),
            "extra field \"truncated\": is bool [1], must be bool []");
}

TEST(StreamSpecTest, BoundsAWholeStep) {
  // 3 environments: 240 MiB, and little besides.
  wire::EnvHello hello = hello_of(box(wire::UINT8, {1 << 20}));
  add_field(&hello, "image", wire::UINT8, {80 << 20});
  EXPECT_EQ(refusal([&] { const StreamSpec spec(hello); }), "accepted");
  // With a final observation it would be too large.
  hello.clear_extra_fields();
  add_field(&hello, "image", wire::UINT8, {84 << 20});
  EXPECT_EQ(refusal([&] { const StreamSpec spec(hello); }), "accepted");
  add_field(&hello, "truncated", wire::BOOL, {});
  EXPECT_NE(refusal([&] { const StreamSpec spec(hello); }).find("a step of 3"),
            std::string::npos);
  hello.clear_extra_fields();
  add_field(&hello, "image", wire::FLOAT32, {20 << 20});
  add_field(&hello, "more", wire::FLOAT32, {3 << 20});
  EXPECT_NE(refusal([&] { const StreamSpec spec(hello); }).find("a step of 3"),
            std::string::npos);

  // The most arrays: 1019 of the observation, 4 of each step, 1 field.
  hello = hello_of(tuple(std::vector<wire::Space>(1019, discrete(2))));
  add_field(&hello, "a", wire::BOOL, {});
  EXPECT_EQ(StreamSpec(hello).arrays.size(), 1024u);
  add_field(&hello, "b", wire::BOOL, {});
  EXPECT_EQ(refusal([&] { const StreamSpec spec(hello); }),
            "hello: 1025 arrays per step, at most 1024 are allowed");
}

// --- Values --------------------------------------------------------------------------

// What is wrong with a step of 3 environments where `change` has changed one number.
template <typename T>
std::string value_refusal(const wire::EnvHello& hello, size_t array, size_t i,
                          T value) {
  MemoryPool pool;
  const StreamSpec spec(hello);
  std::vector<Array> arrays;
  for (size_t k = 0; k < spec.arrays.size(); ++k) {
    arrays.push_back(pool.allocate(spec.arrays[k]));
    std::memset(arrays[k].data(), 0, arrays[k].num_bytes());
    for (size_t n = 0; n < arrays[k].spec().num_elements(); ++n) {
      const std::vector<double>& low = spec.rules[k].low;
      if (!low.empty() && arrays[k].dtype() == DType::kInt64) {
        arrays[k].as<int64_t>()[n] = static_cast<int64_t>(low[n % low.size()]);
      }
    }
  }
  arrays[array].as<T>()[i] = value;
  return refusal([&] { check_values(spec, arrays); });
}

TEST(Values, OutOfRangeAreRefused) {
  const float inf = std::numeric_limits<float>::infinity();
  wire::EnvHello hello = hello_of(tuple({}));
  wire::Space multi;
  for (int64_t n : {5, 7}) multi.mutable_multi_discrete()->add_n(n);
  for (int64_t start : {0, -3}) multi.mutable_multi_discrete()->add_start(start);
  wire::Space binary;
  binary.mutable_multi_binary()->add_shape(11);
  wire::Space wide = box(wire::INT64, {2});
  wire::Space bounded = box(wire::UINT64, {});
  bounded.mutable_box()->add_high(1e12);
  *hello.mutable_observation_space() = dict({{"f16", box(wire::FLOAT16, {2})},
                                             {"d", discrete(4, -1)},
                                             {"b", binary},
                                             {"f32", box(wire::FLOAT32, {9})},
                                             {"f64", box(wire::FLOAT64, {})},
                                             {"m", multi},
                                             {"u8", box(wire::UINT8, {2})},
                                             {"wide", wide},
                                             {"bounded", bounded}});
  *hello.mutable_action_space() = discrete(6, 100);
  add_field(&hello, "last_action", wire::INT64, {});
  add_field(&hello, "game_return", wire::FLOAT32, {});
  add_field(&hello, "mask", wire::FLOAT32, {});
  enum {
    kB,
    kBounded,
    kD,
    kF16,
    kF32,
    kF64,
    kM,
    kU8,
    kWide,
    kReward,
    kDone,
    kStep,
    kReturn,
    kLastAction,
    kGameReturn,
    kMask
  };
  const std::string magnitude =
      "; allowed are finite numbers from -3.40282e+38 to 3.40282e+38";

  EXPECT_EQ(value_refusal<uint8_t>(hello, kU8, 0, 255), "accepted");
  EXPECT_EQ(value_refusal<int64_t>(hello, kD, 0, 2), "accepted");
  EXPECT_EQ(value_refusal<int64_t>(hello, kD, 1, 3),
            "observation[\"d\"]: 3 in environment 1; allowed are -1 to 2");
  EXPECT_EQ(value_refusal<int64_t>(hello, kD, 2, -2),
            "observation[\"d\"]: -2 in environment 2; allowed are -1 to 2");
  EXPECT_EQ(value_refusal<int8_t>(hello, kB, 11, 2),
            "observation[\"b\"]: 2 in environment 1, element 0; allowed are 0 to 1");
  EXPECT_EQ(value_refusal<int64_t>(hello, kM, 5, 3), "accepted");
  EXPECT_EQ(value_refusal<int64_t>(hello, kM, 5, 4),
            "observation[\"m\"]: 4 in environment 2, element 1; allowed are -3 to 3");
  EXPECT_EQ(value_refusal<float>(hello, kF32, 26, 1e38f), "accepted");
  EXPECT_EQ(value_refusal<float>(hello, kF32, 26, inf),
            "observation[\"f32\"]: inf in environment 2, element 8" + magnitude);
  EXPECT_EQ(value_refusal<float>(hello, kF32, 0, std::nanf("")),
            "observation[\"f32\"]: nan in environment 0, element 0" + magnitude);
  EXPECT_EQ(value_refusal<double>(hello, kF64, 1, -1.1e9), "accepted");
  EXPECT_EQ(value_refusal<double>(hello, kF64, 1, -1.1e39),
            "observation[\"f64\"]: -1.1e+39 in environment 1" + magnitude);
  EXPECT_EQ(value_refusal<uint16_t>(hello, kF16, 1, 0x7BFF), "accepted");
  EXPECT_EQ(value_refusal<uint16_t>(hello, kF16, 1, 0xFC00),
            "observation[\"f16\"]: infinite in environment 0, element 1" + magnitude);
  EXPECT_EQ(value_refusal<uint16_t>(hello, kF16, 1, 0x7C01),
            "observation[\"f16\"]: nan in environment 0, element 1" + magnitude);
  EXPECT_EQ(value_refusal<int64_t>(hello, kWide, 3, int64_t{1} << 62), "accepted");
  EXPECT_EQ(value_refusal<uint64_t>(hello, kBounded, 0, ~uint64_t{0}), "accepted");
  EXPECT_EQ(value_refusal<float>(hello, kReward, 1, 2e9f), "accepted");
  EXPECT_EQ(value_refusal<float>(hello, kReward, 1, -inf),
            "reward: -inf in environment 1" + magnitude);
  EXPECT_EQ(value_refusal<int64_t>(hello, kStep, 0, -1),
            "episode_step: -1 in environment 0; allowed are 0 to 9007199254740992");
  EXPECT_EQ(value_refusal<float>(hello, kReturn, 0, 3e38f), "accepted");
  EXPECT_NE(value_refusal<float>(hello, kReturn, 0, inf), "accepted");
  EXPECT_NE(value_refusal<float>(hello, kGameReturn, 0, std::nanf("")), "accepted");
  EXPECT_EQ(value_refusal<int64_t>(hello, kLastAction, 2, 6),
            "last_action: 6 in environment 2; allowed are 0 to 5");
  // An own field may say anything.
  EXPECT_EQ(value_refusal<float>(hello, kMask, 2, -inf), "accepted");
}

TEST(SpaceSpec, RefusesNamingThePlace) {
  const auto reason = space_refusal;
  const auto inside = [&](const wire::Space& space) {
    const wire::Space outer = dict({{"camera", tuple({space})}, {"x", discrete(2)}});
    const std::string text = reason(outer);
    const std::string place = "observation[\"camera\"][0]: ";
    EXPECT_EQ(text.substr(0, place.size()), place);
    return text.substr(std::min(text.size(), place.size()));
  };

  // Shapes and dtypes.
  EXPECT_EQ(reason(box(wire::UINT8, {1, 2, 3, 4, 5, 6})), "accepted");
  EXPECT_EQ(inside(box(wire::UINT8, {1, 2, 3, 4, 5, 6, 7})),
            "7 dimensions, at most 6 are allowed");
  EXPECT_EQ(inside(box(static_cast<wire::DType>(13), {1})),
            "no such dtype: 13, allowed are 1 to 12");
  EXPECT_EQ(inside(box(wire::UINT8, {~uint64_t{0}})),
            "18446744073709551615 elements in a dimension, at most 268435456 are "
            "allowed");
  EXPECT_EQ(inside(box(wire::FLOAT64, {1 << 26})),
            "float64 [3, 67108864] is larger than a message may be, 268435456 bytes");
  EXPECT_EQ(inside(box(wire::FLOAT64, {1 << 28, 1 << 28, 1 << 28, 0})),
            "float64 [3, 268435456, 268435456, 268435456, 0] is larger than a message "
            "may be, 268435456 bytes");
  wire::Space space;
  for (int i = 0; i < 7; ++i) space.mutable_multi_binary()->add_shape(1);
  EXPECT_EQ(inside(space), "7 dimensions, at most 6 are allowed");

  wire::Space no_choices;
  no_choices.mutable_multi_discrete();
  EXPECT_EQ(inside(no_choices), "MultiDiscrete without n");

  // Bounds.
  const auto bounded = [&](const std::vector<double>& low,
                           const std::vector<double>& high) {
    wire::Space space = box(wire::FLOAT32, {2, 2});
    for (double value : low) space.mutable_box()->add_low(value);
    for (double value : high) space.mutable_box()->add_high(value);
    return space;
  };
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(reason(bounded({0}, {1, 2, 3, 4})), "accepted");
  EXPECT_EQ(reason(bounded({-inf}, {})), "accepted");
  EXPECT_EQ(reason(bounded({}, {inf, 1, 1, 1})), "accepted");
  EXPECT_EQ(inside(bounded({0, 0}, {})),
            "Box with 2 values in low; allowed are 0, 1 or 4, the number of elements");
  EXPECT_EQ(inside(bounded({0}, {0, 0, 0, 0, 0})),
            "Box with 5 values in high; allowed are 0, 1 or 4, the number of elements");
  EXPECT_EQ(inside(bounded({2}, {3, 3, 1, 3})),
            "Box with bounds 2.000000 to 1.000000 of element 2; low must be at most "
            "high, and numbers of float32 or infinite");
  EXPECT_NE(reason(bounded({std::nan("")}, {})), "accepted");
  EXPECT_NE(reason(bounded({}, {std::nan("")})), "accepted");
  wire::Space no_elements = box(wire::FLOAT32, {0});
  no_elements.mutable_box()->add_low(1);
  EXPECT_EQ(reason(tuple({no_elements, discrete(2)})), "accepted");
  EXPECT_NE(reason(bounded({inf}, {})), "accepted");
  EXPECT_NE(reason(bounded({}, {-inf})), "accepted");
  EXPECT_EQ(reason(bounded({-1e300}, {1e300})), "accepted");
  // What the dtype can't hold.
  const auto of = [&](wire::DType dtype, double low, double high) {
    wire::Space space = box(dtype, {2});
    space.mutable_box()->add_low(low);
    space.mutable_box()->add_high(high);
    return reason(space);
  };
  EXPECT_EQ(of(wire::UINT8, 0, 255), "accepted");
  EXPECT_EQ(of(wire::UINT8, -1, 255),
            "observation: Box with bounds -1.000000 to 255.000000 of element 0; low "
            "must be at most high, and numbers of uint8 or infinite");
  const double p63 = std::ldexp(1, 63), p64 = std::ldexp(1, 64);
  struct {
    wire::DType dtype;
    double low, high;
  } const ends[] = {
      {wire::BOOL, 0, 1},
      {wire::UINT8, 0, 255},
      {wire::INT8, -128, 127},
      {wire::UINT16, 0, 65535},
      {wire::INT16, -32768, 32767},
      {wire::UINT32, 0, 4294967295.0},
      {wire::INT32, -2147483648.0, 2147483647.0},
  };
  for (const auto& [dtype, low, high] : ends) {
    EXPECT_EQ(of(dtype, low, high), "accepted");
    EXPECT_EQ(of(dtype, -inf, inf), "accepted");
    EXPECT_NE(of(dtype, low - 1, high), "accepted");
    EXPECT_NE(of(dtype, low, high + 1), "accepted");
  }
  EXPECT_EQ(of(wire::INT64, -p63, p63), "accepted");
  EXPECT_EQ(of(wire::UINT64, 0, p64), "accepted");
  EXPECT_NE(of(wire::INT64, -2 * p63, 0), "accepted");
  EXPECT_NE(of(wire::UINT64, 0, 2 * p64), "accepted");

  // Sizes.
  EXPECT_EQ(reason(box(wire::UINT8, {1 << 20})), "accepted");
  EXPECT_EQ(inside(box(wire::UINT8, {(1 << 20) + 1})),
            "1048577 elements or more in the space, at most 1048576 are allowed");
  EXPECT_EQ(inside(discrete((1 << 18) + 1)),
            "n is 262145, and all n of a space together may be at most 262144");
  EXPECT_EQ(reason(tuple({discrete(1 << 17), discrete((1 << 17) + 1)})),
            "observation[1]: n is 131073, and all n of a space together may be at most "
            "262144");
  wire::EnvHello hello = hello_of(discrete(2));
  *hello.mutable_action_space() = discrete((1 << 16) + 1);
  EXPECT_EQ(refusal([&] { StreamSpec{hello}; }),
            "action: n is 65537, and all n of a space together may be at most 65536");
  *hello.mutable_action_space() = tuple({});
  EXPECT_EQ(refusal([&] { StreamSpec{hello}; }),
            "action: the space has no array with an element");

  // Discrete ones.
  EXPECT_EQ(inside(discrete(0)), "n is 0, must be 1 or more");
  EXPECT_EQ(inside(discrete(-3)), "n is -3, must be 1 or more");
  const int64_t max = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(reason(discrete(1, kMaxStep)), "accepted");
  EXPECT_EQ(reason(discrete(1 << 18, -kMaxStep)), "accepted");
  EXPECT_EQ(inside(discrete(2, max)),
            "start 9223372036854775807 and n 2 exceed -2^53 to 2^53");
  EXPECT_NE(reason(discrete(2, kMaxStep)), "accepted");
  EXPECT_NE(reason(discrete(2, -kMaxStep - 1)), "accepted");
  wire::Space multi;
  for (int64_t n : {5, 0}) multi.mutable_multi_discrete()->add_n(n);
  EXPECT_EQ(reason(multi), "observation[1]: n is 0, must be 1 or more");
  multi.mutable_multi_discrete()->set_n(1, 7);
  EXPECT_EQ(reason(multi), "accepted");
  multi.mutable_multi_discrete()->add_start(1);
  EXPECT_EQ(
      inside(multi),
      "MultiDiscrete with 1 values in start; allowed are 0 or 2, as many as in n");
  multi.mutable_multi_discrete()->add_start(max);
  EXPECT_EQ(reason(multi),
            "observation[1]: start 9223372036854775807 and n 7 exceed -2^53 to 2^53");

  // Dicts and tuples.
  wire::Space uneven = dict({{"a", discrete(2)}});
  uneven.mutable_dict()->add_keys("b");
  EXPECT_EQ(inside(uneven),
            "Dict with 2 keys and 1 values; there must be as many of both");
  EXPECT_EQ(inside(dict({{"a", discrete(2)}, {"a", discrete(2)}})),
            "the key \"a\" comes twice");
  EXPECT_EQ(
      inside(dict({{std::string(1025, 'k'), discrete(2)}})),
      "1025 bytes in \"" + std::string(64, 'k') + "...\", at most 1024 are allowed");
  for (const wire::Space& nothing :
       {tuple({}), dict({{"a", tuple({})}}), box(wire::UINT8, {3, 0})}) {
    EXPECT_EQ(reason(nothing), "observation: the space has no array with an element");
  }
}

TEST(SpaceSpec, BoundsLevelsAndArrays) {
  // Of tuples and dicts by turns.
  const auto wrap = [](int level, const wire::Space& space) {
    return level % 2 == 0 ? tuple({space}) : dict({{"k", space}});
  };
  wire::Space nested = discrete(2);
  std::string place;
  for (int level = 2; level <= kMaxDepth + 1; ++level) {
    if (level == kMaxDepth + 1) {
      EXPECT_EQ(space_refusal(nested), "accepted");
    }
    nested = wrap(level, nested);
    place = (level % 2 == 0 ? "[0]" : "[\"k\"]") + place;
  }
  EXPECT_EQ(space_refusal(nested),
            "observation" + place + ": 17 levels of spaces, at most 16 are allowed");

  // The last array allowed is an empty Dict; other arrays of a step come on top.
  std::vector<wire::Space> items(1018, discrete(2));
  items.push_back(dict({}));
  EXPECT_EQ(space_refusal(tuple(items)), "accepted");
  items.resize(1024, tuple({}));
  EXPECT_EQ(space_refusal(tuple(items)), "accepted");
  items.push_back(tuple({}));
  EXPECT_EQ(space_refusal(tuple(items)),
            "observation[1024]: 1025 arrays, at most 1024 are allowed");
}

}  // namespace
}  // namespace torchbeast
