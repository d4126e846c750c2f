// The codec against protobuf's generated classes, and against peers that lie.

#include "codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "messages.h"
#include "test_util.h"

namespace torchbeast {
namespace {

// --- Helpers -------------------------------------------------------------------------

// Random numbers, and random bools.
Array random_array(const ArraySpec& spec) {
  static std::mt19937 random(5);
  const Array array = pool().allocate(spec);
  for (size_t i = 0; i < array.num_bytes(); ++i) {
    array.data()[i] =
        static_cast<uint8_t>(spec.dtype == DType::kBool ? random() % 2 : random());
  }
  return array;
}

std::vector<Array> random_arrays(const std::vector<ArraySpec>& specs) {
  std::vector<Array> arrays;
  for (const ArraySpec& spec : specs) arrays.push_back(random_array(spec));
  return arrays;
}

// E = 3; uint8 [5, 2], float32 [0, 3] and bool [] are observed.
wire::EnvHello make_hello() {
  wire::EnvHello hello;
  hello.set_version(kWireVersion);
  hello.set_num_envs(3);
  auto* spaces = hello.mutable_observation_space()->mutable_tuple();
  const auto add = [&](wire::DType dtype, const std::vector<uint64_t>& shape) {
    auto* box = spaces->add_items()->mutable_box();
    box->set_dtype(dtype);
    for (uint64_t dim : shape) box->add_shape(dim);
  };
  add(wire::UINT8, {5, 2});
  add(wire::FLOAT32, {0, 3});
  add(wire::BOOL, {});
  hello.mutable_action_space()->mutable_discrete()->set_n(7);
  wire::Field* field = hello.add_extra_fields();
  field->set_name("truncated");
  field->set_dtype(wire::BOOL);
  return hello;
}

const StreamSpec& spec() {
  static const StreamSpec spec(make_hello());
  return spec;
}

std::vector<ArraySpec> observation_specs() { return spec().observation.flatten(); }
constexpr size_t kStepBytes = 30 + 0 + 3 + 12 + 3 + 24 + 12 + 3;

wire::EnvMessage step_proto(const EnvRow& row) {
  wire::EnvMessage message;
  message.mutable_step()->set_arrays(content(row.arrays));
  message.mutable_step()->set_final_observation(content(row.final_observation));
  message.mutable_step()->set_env_nanoseconds(row.env_nanoseconds);
  return message;
}

EnvRow random_row(bool is_truncated, uint64_t time) {
  EnvRow row{random_arrays(spec().arrays), {}, time};
  if (is_truncated) row.final_observation = random_arrays(observation_specs());
  return row;
}

// Throws WireError. An error is returned in place of a row.
std::pair<EnvRow, std::optional<std::string>> decode(const std::string& bytes,
                                                     size_t chunk = 1 << 20) {
  EnvRow row;
  for (const ArraySpec& wanted : spec().arrays) {
    row.arrays.push_back(pool().allocate(wanted));
  }
  grpc::ByteBuffer buffer = buffer_of(bytes, chunk);
  auto error = decode_step(&buffer, spec(), pool(), &row);
  return {std::move(row), std::move(error)};
}

void expect_equal(const EnvRow& row, const wire::EnvStep& step) {
  EXPECT_EQ(content(row.arrays), step.arrays());
  EXPECT_EQ(content(row.final_observation), step.final_observation());
  EXPECT_EQ(row.final_observation.empty(), step.final_observation().empty());
  EXPECT_EQ(row.env_nanoseconds, step.env_nanoseconds());
}

// Protobuf's encoding, by hand, so that it can be wrong.
std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}
std::string tag(uint64_t field, uint64_t type) { return varint(field << 3 | type); }
std::string number(uint64_t field, uint64_t value) {
  return tag(field, 0) + varint(value);
}
std::string bytes(uint64_t field, const std::string& content) {
  return tag(field, 2) + varint(content.size()) + content;
}

// --- Steps and actions against protobuf ----------------------------------------------

TEST(Codec, StepsAreByteForByteWhatProtobufWrites) {
  for (const bool is_truncated : {false, true}) {
    for (const uint64_t time : {uint64_t{0}, uint64_t{1}, uint64_t{127}, uint64_t{128},
                                uint64_t{1} << 40, ~uint64_t{0}}) {
      const EnvRow row = random_row(is_truncated, time);
      const wire::EnvMessage oracle = step_proto(row);
      const std::string bytes = oracle.SerializeAsString();
      EXPECT_EQ(bytes_of(encode_step(row, pool())), bytes);
      for (size_t chunk : {1, 2, 3, 7, 64, 1 << 20}) {
        const auto [decoded, error] = decode(bytes, chunk);
        EXPECT_FALSE(error);
        expect_equal(decoded, oracle.step());
      }
    }
  }
}

TEST(Codec, ActionsAreByteForByteWhatProtobufWrites) {
  for (const int64_t size : {1, 127, 128, 70000}) {
    const std::vector<ArraySpec> specs = {{DType::kInt64, {3}},
                                          {DType::kUint8, {3, size}}};
    const std::vector<Array> action = random_arrays(specs);
    wire::AgentMessage oracle;
    oracle.mutable_action()->set_arrays(content(action));
    oracle.mutable_action()->set_number(1000);
    grpc::ByteBuffer buffer = encode_action(action, 1000, pool());
    EXPECT_EQ(bytes_of(buffer), oracle.SerializeAsString());
    const std::vector<Array> decoded = random_arrays(specs);
    EXPECT_EQ(decode_action(&buffer, decoded), 1000u);
    EXPECT_EQ(content(decoded), content(action));
  }
}

TEST(Codec, AnActionMaySayItsLayout) {
  const std::vector<Array> action = {random_array({DType::kFloat32, {2, 3}})};
  wire::AgentMessage oracle;
  oracle.mutable_action()->set_arrays(content(action));
  oracle.mutable_action()->set_number(7);
  oracle.mutable_action()->mutable_layout()->set_dtype(wire::FLOAT32);
  oracle.mutable_action()->mutable_layout()->add_shape(3);
  grpc::ByteBuffer buffer = encode_action(action, 7, pool(), true);
  EXPECT_EQ(bytes_of(buffer), oracle.SerializeAsString());
  std::vector<Array> decoded;
  EXPECT_EQ(decode_action_with_layout(&buffer, 2, pool(), &decoded), 7u);
  EXPECT_EQ(decoded.at(0).spec(), action[0].spec());
  EXPECT_EQ(content(decoded), content(action));
  buffer = encode_action(action, 7, pool(), true);
  EXPECT_NE(refusal([&] { decode_action_with_layout(&buffer, 3, pool(), &decoded); }),
            "accepted");
  buffer = encode_action(action, 7, pool());
  EXPECT_NE(refusal([&] { decode_action_with_layout(&buffer, 2, pool(), &decoded); }),
            "accepted");
}

TEST(Codec, TheFirstArrayBeginsACacheLine) {
  for (int64_t size : {1, 1000, 70000}) {
    const Array first = random_array({DType::kUint8, {size}});
    const grpc::ByteBuffer buffer = encode_action({first}, 0, pool());
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 1u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slices[0].end() - size) % 64, 0u);
  }
}

TEST(Codec, MemoryGoesBackToThePoolFromAnyThread) {
  const EnvRow row = random_row(true, 1);
  auto own_pool = std::make_unique<MemoryPool>();
  grpc::ByteBuffer first = encode_step(row, *own_pool);
  const std::string bytes = bytes_of(first);
  const size_t one_message = own_pool->num_bytes();
  EXPECT_GE(one_message, bytes.size());
  for (int i = 0; i < 10; ++i) {
    grpc::ByteBuffer second = encode_step(row, *own_pool);
    std::thread([&] { second.Clear(); }).join();
  }
  EXPECT_EQ(own_pool->num_bytes(), 2 * one_message);
  own_pool.reset();  // a message outlives it
  EXPECT_EQ(bytes_of(first), bytes);
}

// As protobuf reads them: unknown fields, fields in any order, and of a field that
// comes twice the last.
TEST(Codec, OtherFormsOfAStepAreReadAsProtobufDoes) {
  const std::string arrays(kStepBytes, '\1'), others(kStepBytes, '\0');
  const std::string final_observation(33, '\1');
  const std::string unknown = number(4, 1) + bytes(15, "later") + tag(99, 1) +
                              "12345678" + tag(9, 3) + number(8, 1) + tag(9, 4) +
                              tag(536870911, 5) + "1234";
  for (const std::string& step :
       {bytes(1, arrays), unknown + bytes(1, arrays) + unknown,
        number(3, 5) + unknown + bytes(2, final_observation) + bytes(1, arrays),
        bytes(1, others) + bytes(1, arrays) + number(3, 4) + number(3, 5),
        bytes(1, arrays) + bytes(2, final_observation) + bytes(2, ""),
        bytes(1, arrays) + bytes(2, others.substr(0, 33)) +
            bytes(2, final_observation)}) {
    wire::EnvMessage oracle;
    ASSERT_TRUE(oracle.ParseFromString(bytes(2, step)));
    expect_equal(decode(bytes(2, step), 3).first, oracle.step());
  }
}

TEST(Codec, NoBytesNeedNoField) {
  const std::vector<Array> nothing = {random_array({DType::kInt64, {3, 0}})};
  for (const std::string& message : {bytes(2, ""), bytes(2, bytes(1, ""))}) {
    grpc::ByteBuffer buffer = buffer_of(message);
    EXPECT_EQ(refusal([&] { decode_action(&buffer, nothing); }), "accepted");
  }
}

// --- What a peer may not send --------------------------------------------------------

TEST(Codec, RefusesWithAReason) {
  const std::string good(kStepBytes, '\1');
  const std::string malformed =
      "malformed message: it is none that torchbeast.proto describes";
  std::string bad_bool = good;
  bad_bool[32] = '\2';
  const std::pair<std::string, std::string> cases[] = {
      {bytes(2, bytes(1, good.substr(1))),
       "step: 86 bytes, and the spaces of the hello make 87"},
      {bytes(2, bytes(1, good + "x")),
       "step: 88 bytes, and the spaces of the hello make 87"},
      {bytes(2, ""), "step: 0 bytes, and the spaces of the hello make 87"},
      {bytes(2, bytes(1, good) + bytes(2, "x")),
       "final_observation: 1 bytes, and the spaces of the hello make 33"},
      {bytes(2, bytes(1, bad_bool)), "step: a BOOL of bool [3] is neither 0 nor 1"},
      {bytes(2, bytes(1, good) + bytes(2, std::string(33, '\2'))),
       "final_observation: a BOOL of bool [3] is neither 0 nor 1"},
      {bytes(1, ""), "a second hello"},
      {"", "message: neither a step nor an error"},
      {number(9, 9), "message: neither a step nor an error"},
      {bytes(9, "") + bytes(2, bytes(1, good)), "message: neither a step nor an error"},
      {bytes(2, bytes(1, good)) + bytes(3, ""), malformed},
      {bytes(2, bytes(1, good)) + number(9, 9), malformed},
      {bytes(2, bytes(1, good)) + bytes(2, bytes(1, good)), malformed},
      {bytes(2, number(1, 1)), "step: 0 bytes, and the spaces of the hello make 87"},
      {bytes(2, tag(9, 3)), malformed},  // a group without an end
      {bytes(2, tag(9, 4)), malformed},
      {bytes(2, tag(9, 7)), malformed},
      {bytes(2, number(0, 1)), malformed},
      {bytes(2, tag(9, 1) + "1234567"), malformed},
      {bytes(2, tag(9, 5) + "123"), malformed},
      {bytes(2, tag(9, 2) + varint(4) + "123"), malformed},
      {bytes(2, tag(3, 0) + std::string(11, '\xFF')), malformed},
      {std::string(1000, '\xFF'), malformed},
      {bytes(3, bytes(1, "\xFF")), malformed},  // not UTF-8
      {bytes(3, bytes(1, std::string(256 << 10, 'x'))),
       "message: 262152 bytes, at most 262144 are allowed"},
  };
  for (const auto& [message, reason] : cases) {
    for (size_t chunk : {size_t{1} << 24, size_t{3}}) {
      if (message.size() > 2000 && chunk == 3) continue;
      const std::string& sent = message;
      EXPECT_EQ(refusal([&] { decode(sent, chunk); }), reason)
          << testing::PrintToString(sent);
    }
  }
  EXPECT_EQ(decode(bytes(3, bytes(1, "broken"))).second, "broken");

  const std::vector<Array> action = {random_array({DType::kBool, {2}})};
  const auto reason = [&](const std::string& bytes) {
    grpc::ByteBuffer buffer = buffer_of(bytes);
    return refusal([&] { decode_action(&buffer, action); });
  };
  EXPECT_EQ(reason(bytes(2, bytes(1, std::string("\1\0", 2)))), "accepted");
  EXPECT_EQ(reason(bytes(2, bytes(1, "\2\1"))),
            "action: a BOOL of bool [2] is neither 0 nor 1");
  EXPECT_EQ(reason(bytes(2, bytes(1, "\1"))),
            "action: 1 bytes, and the spaces of the hello make 2");
  EXPECT_EQ(reason(bytes(1, "")), "a second hello");
  EXPECT_EQ(reason(bytes(3, "")), "message: no action");
  EXPECT_EQ(reason("\xFF"), malformed);
  grpc::ByteBuffer nothing;
  EXPECT_EQ(refusal([&] { decode_action(&nothing, action); }),
            "message: no bytes at all");
}

TEST(Codec, TakesNoMemoryForAStepOfAnotherSize) {
  const std::string good(kStepBytes, '\1');
  const auto bytes_for = [&](const std::string& message) {
    MemoryPool memory;
    grpc::ByteBuffer buffer = buffer_of(message);
    EnvRow row;
    static_cast<void>(refusal([&] { decode_step(&buffer, spec(), memory, &row); }));
    return memory.num_bytes();
  };
  EXPECT_GT(bytes_for(bytes(2, bytes(1, good))), 0u);
  for (const std::string& message :
       {bytes(2, bytes(1, good + "x")), bytes(2, ""), bytes(2, bytes(2, "x")),
        bytes(3, bytes(1, "broken"))}) {
    EXPECT_EQ(bytes_for(message), 0u) << testing::PrintToString(message);
  }
}

TEST(Codec, BoundsAMessage) {
  const grpc::Slice slice(std::string(1 << 20, '\0'));
  const std::vector<grpc::Slice> slices(257, slice);
  grpc::ByteBuffer buffer(slices.data(), slices.size());
  EXPECT_EQ(refusal([&] { decode_action(&buffer, {}); }),
            "message: 269484032 bytes, at most 268435456 are allowed");
  EXPECT_EQ(refusal([&] { decode_agent_message(&buffer); }),
            "message: 269484032 bytes, at most 262144 are allowed");
  std::vector<Array> action;
  EXPECT_EQ(refusal([&] { decode_action_with_layout(&buffer, 1, pool(), &action); }),
            "message: 269484032 bytes, at most 4194304 are allowed");
}

TEST(Codec, FindsABadBoolAnywhere) {
  for (int64_t size : {1, 7, 8, 9, 31}) {
    const std::vector<Array> action = {random_array({DType::kBool, {size}})};
    for (int64_t i = 0; i < size; ++i) {
      for (const char value : {'\1', '\2', '\x80'}) {
        std::string data(static_cast<size_t>(size), '\1');
        data[static_cast<size_t>(i)] = value;
        grpc::ByteBuffer buffer = buffer_of(bytes(2, bytes(1, data)));
        EXPECT_EQ(refusal([&] { decode_action(&buffer, action); }) == "accepted",
                  value == 1);
      }
    }
  }
}

// A damaged message is refused, or read as protobuf reads it.
void expect_refused_or_as_protobuf(const std::string& bytes, size_t chunk) {
  wire::EnvMessage oracle;
  const bool can_parse = oracle.ParseFromString(bytes);
  try {
    const auto [row, error] = decode(bytes, chunk);
    // Protobuf allows fewer forms of a length.
    if (error) {
      EXPECT_EQ(*error, oracle.error().message());
    } else if (can_parse) {
      expect_equal(row, oracle.step());
    }
  } catch (const WireError&) {
  }
}

TEST(Codec, SurvivesTruncationAnywhere) {
  const std::string whole = bytes_of(encode_step(random_row(true, 300), pool()));
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_NE(refusal([&] { decode(whole.substr(0, size), 5); }), "accepted");
  }
}

TEST(Codec, SurvivesAnyByteBeingAnyOther) {
  const std::string whole = bytes_of(encode_step(random_row(true, 300), pool()));
  for (size_t i = 0; i < whole.size(); ++i) {
    for (int change = 1; change < 256; ++change) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ change);
      expect_refused_or_as_protobuf(damaged, static_cast<size_t>(change % 7 + 1));
    }
  }
}

TEST(Codec, SurvivesBytesGoneOrDoubled) {
  const std::string whole = bytes_of(encode_step(random_row(true, 300), pool()));
  for (size_t i = 0; i < whole.size(); ++i) {
    for (size_t size : {1, 2, 9}) {
      const std::string gone =
          whole.substr(0, i) + whole.substr(std::min(whole.size(), i + size));
      expect_refused_or_as_protobuf(gone, 4);
      expect_refused_or_as_protobuf(
          whole.substr(0, i) + whole.substr(i, size) + whole.substr(i), 4);
    }
  }
}

TEST(Codec, SurvivesLengthsThatLie) {
  const std::string good(kStepBytes, '\1');
  const auto message = [&](uint64_t step, uint64_t arrays) {
    return tag(2, 2) + varint(step) + tag(1, 2) + varint(arrays) + good;
  };
  const auto step_size = [](uint64_t arrays) {
    return 1 + varint(arrays).size() + kStepBytes;
  };
  EXPECT_EQ(refusal([&] { decode(message(step_size(kStepBytes), kStepBytes)); }),
            "accepted");
  for (uint64_t lie : {uint64_t{0}, uint64_t{kStepBytes - 1}, uint64_t{kStepBytes + 1},
                       uint64_t{100}, (uint64_t{1} << 31) - 1, uint64_t{1} << 31,
                       uint64_t{1} << 32, uint64_t{1} << 63, ~uint64_t{0}}) {
    EXPECT_NE(refusal([&] { decode(message(step_size(lie), lie)); }), "accepted");
    EXPECT_NE(refusal([&] { decode(message(lie, kStepBytes)); }), "accepted");
  }
}

// --- Handshakes and errors -----------------------------------------------------------

TEST(Codec, HellosGoThrough) {
  wire::EnvMessage env;
  *env.mutable_hello() = make_hello();
  grpc::ByteBuffer buffer = encode(env);
  EXPECT_EQ(decode_env_message(&buffer).SerializeAsString(), env.SerializeAsString());

  wire::AgentMessage agent;
  agent.mutable_hello()->set_version(5);
  agent.mutable_hello()->mutable_seeding()->set_seed(~uint64_t{0});
  agent.mutable_hello()->mutable_seeding()->set_stream(3);
  buffer = encode(agent);
  EXPECT_EQ(decode_agent_message(&buffer).SerializeAsString(),
            agent.SerializeAsString());
}

TEST(Codec, TextsThatAreNoUtf8AreShortened) {
  EXPECT_EQ(shortened(std::string(1000, '\x80'), 20).size(), 27u);
  EXPECT_EQ(shortened("aaaa\xE2\x82\xAC"
                      "bbbb\xE2\x82\xAC"
                      "cccc",
                      10),
            "aaaa\n[...]\n\xE2\x82\xAC"
            "cccc");
}

TEST(Codec, AHelloThatIsTooLargeIsNotSent) {
  wire::EnvMessage env;
  auto* box = env.mutable_hello()->mutable_observation_space()->mutable_box();
  for (int i = 0; i < 1 << 20; ++i) box->add_low(0);
  EXPECT_TRUE(
      contains(refusal([&] { encode(env); }), "at most 262144 are allowed; give one"));
}

TEST(Codec, DeepNestingDoesNotOverflowTheStack) {
  const auto reason = [](int levels) {
    std::string space = bytes(5, "");
    for (int i = 1; i < levels; ++i) space = bytes(5, bytes(1, space));
    const std::string action = bytes(2, number(1, 2));
    grpc::ByteBuffer buffer =
        buffer_of(bytes(1, number(1, kWireVersion) + number(3, 1) + bytes(4, space) +
                               bytes(5, action)));
    return refusal([&] { StreamSpec{decode_env_message(&buffer).hello()}; });
  };
  EXPECT_TRUE(contains(reason(16), "no array with an element"));
  EXPECT_TRUE(contains(reason(17), "17 levels of spaces, at most 16"));
  EXPECT_TRUE(contains(reason(30), "17 levels of spaces, at most 16"));
  for (int levels : {100, 10000}) EXPECT_TRUE(contains(reason(levels), "malformed"));
}

TEST(Codec, ErrorsCarryAnyText) {
  const auto sent = [](const std::string& text) {
    return decode(bytes_of(encode_error(text))).second.value_or("a step");
  };
  EXPECT_EQ(sent(""), "");
  const std::string text = "Traceback: \xC3\xA9 \xE2\x82\xAC \xF0\x9F\x90\x99\n";
  EXPECT_EQ(sent(text), text);
  EXPECT_EQ(sent("\xC3\xA9 and \xFF\n"), "?? and ?\n");

  const std::string cut = sent("first " + std::string(1 << 20, '\xFF') + " last");
  EXPECT_EQ(cut.substr(0, 6), "first ");
  EXPECT_EQ(cut.substr(cut.size() - 5), " last");
  EXPECT_TRUE(contains(cut, "\n[...]\n"));
  EXPECT_LT(cut.size(), 70u << 10);
  // It is not cut inside of a character.
  for (size_t shift = 0; shift < 4; ++shift) {
    std::string octopuses(shift, 'x');
    for (int i = 0; i < 1 << 16; ++i) octopuses += "\xF0\x9F\x90\x99";
    const std::string sent_text = sent(octopuses);
    EXPECT_LT(sent_text.size(), 70u << 10);
    EXPECT_EQ(sent_text.find('?'), std::string::npos);
  }
}

}  // namespace
}  // namespace torchbeast
