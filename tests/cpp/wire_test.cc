// The wire codec against protobuf's generated classes, and against peers that lie.

#include "wire.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

namespace torchbeast {
namespace {

using google::protobuf::io::ArrayInputStream;

// --- Helpers -------------------------------------------------------------------------

// A buffer of slices of `chunk` bytes each, as the transport may deliver a message.
grpc::ByteBuffer buffer_of(const std::string& bytes, size_t chunk = 1 << 20) {
  std::vector<grpc::Slice> slices;
  for (size_t i = 0; i < bytes.size(); i += chunk) {
    slices.emplace_back(bytes.substr(i, chunk));
    if (i == 0) slices.emplace_back();  // and one without bytes
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string bytes_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// The text of the WireError that f throws.
template <typename F>
std::string refusal(const F& f) {
  try {
    f();
  } catch (const WireError& error) {
    return error.what();
  }
  return "accepted";
}

MemoryPool& pool() {
  static MemoryPool pool;
  return pool;
}

// An array of these bytes; random ones, bools among them, if there are none.
Array make_array(const ArraySpec& spec, std::string bytes = "") {
  static std::mt19937 random(5);
  const Array array = pool().allocate(spec);
  while (bytes.size() < array.num_bytes()) {
    bytes += static_cast<char>(spec.dtype == DType::kBool ? random() % 2 : random());
  }
  std::memcpy(array.data(), bytes.data(), array.num_bytes());
  return array;
}

std::string content(const Array& array) {
  return std::string(array.as<const char>(), array.num_bytes());
}

void expect_equal(const std::vector<Array>& a, const std::vector<Array>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].spec().to_string(), b[i].spec().to_string());
    EXPECT_EQ(content(a[i]), content(b[i]));
  }
}

// Protobuf's view of an array.
Array from_proto(const wire::Array& proto) {
  Shape shape;
  for (uint64_t dim : proto.shape()) shape.push_back(static_cast<int64_t>(dim));
  return make_array({static_cast<DType>(proto.dtype()), shape}, proto.data());
}

std::vector<Array> from_proto(
    const google::protobuf::RepeatedPtrField<wire::Array>& list) {
  std::vector<Array> arrays;
  for (const wire::Array& proto : list) arrays.push_back(from_proto(proto));
  return arrays;
}

void to_proto(const Array& array, wire::Array* proto) {
  proto->set_dtype(static_cast<wire::DType>(array.dtype()));
  for (int64_t dim : array.shape()) proto->add_shape(static_cast<uint64_t>(dim));
  proto->set_data(content(array));
}

wire::EnvMessage step_proto(const std::vector<Array>& arrays,
                            const std::vector<Array>& final_observation) {
  wire::EnvMessage message;
  for (const Array& array : arrays) {
    to_proto(array, message.mutable_step()->add_arrays());
  }
  for (const Array& array : final_observation) {
    to_proto(array, message.mutable_step()->add_final_observation());
  }
  return message;
}

// Of every dtype, with every number of dimensions, and without elements.
std::vector<Array> all_kinds_of_arrays() {
  std::vector<Array> arrays;
  Shape shape;
  for (int number = 1; number <= 12; ++number) {
    arrays.push_back(make_array({static_cast<DType>(number), shape}));
    if (shape.size() < Shape::kMaxDims) shape.push_back(1 + number % 3);
  }
  arrays.push_back(make_array({DType::kUint8, {3, 300}}));  // two bytes of a varint
  arrays.push_back(make_array({DType::kFloat32, {0}}));
  arrays.push_back(make_array({DType::kInt64, {3, 0, 7}}));
  return arrays;
}

// Accepts everything.
Destination collect(std::vector<Array>* arrays) {
  return [arrays](size_t i, const ArraySpec& spec) {
    EXPECT_EQ(i, arrays->size());
    arrays->push_back(pool().allocate(spec));
    return arrays->back();
  };
}

struct Step {
  Decoded decoded;
  std::vector<Array> arrays;
  std::vector<Array> final_observation;
};

Step decode(const std::string& bytes, size_t chunk = 1 << 20) {
  Step step;
  grpc::ByteBuffer buffer = buffer_of(bytes, chunk);
  step.decoded = decode_env_message(&buffer, collect(&step.arrays),
                                    collect(&step.final_observation));
  EXPECT_EQ(step.decoded.num_arrays, step.arrays.size());
  EXPECT_EQ(step.decoded.num_final_arrays, step.final_observation.size());
  return step;
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
std::string step_of(const std::string& array) { return bytes(2, bytes(1, array)); }

const std::string kDTypeUint8 = number(1, 2);
const std::string kShape3 = bytes(2, varint(3));
const std::string kDataAbc = bytes(3, "abc");

// --- Steps and actions against protobuf ----------------------------------------------

TEST(Encode, StepIsByteForByteWhatProtobufWrites) {
  const auto arrays = all_kinds_of_arrays();
  const std::vector<Array> final_observation = {arrays[3], arrays[0]};
  const std::string ours = bytes_of(encode_step(arrays, final_observation, pool()));
  EXPECT_EQ(ours, step_proto(arrays, final_observation).SerializeAsString());

  wire::EnvMessage parsed;
  ASSERT_TRUE(parsed.ParseFromString(ours));
  expect_equal(from_proto(parsed.step().arrays()), arrays);
  expect_equal(from_proto(parsed.step().final_observation()), final_observation);
}

TEST(Encode, TimesAreByteForByteWhatProtobufWrites) {
  const auto arrays = all_kinds_of_arrays();
  for (const uint64_t time : {uint64_t{0}, uint64_t{1}, uint64_t{127}, uint64_t{128},
                              uint64_t{1} << 40, ~uint64_t{0}}) {
    wire::EnvMessage message = step_proto(arrays, {arrays[0]});
    message.mutable_step()->set_env_nanoseconds(time);
    const std::string bytes = message.SerializeAsString();
    EXPECT_EQ(bytes_of(encode_step(arrays, {arrays[0]}, pool(), time)), bytes);
    for (size_t chunk : {1, 7, 1 << 20}) {
      const Step step = decode(bytes, chunk);
      EXPECT_EQ(step.decoded.env_nanoseconds, time);
      expect_equal(step.arrays, arrays);
    }
  }
}

TEST(Encode, ActionIsByteForByteWhatProtobufWrites) {
  const auto arrays = all_kinds_of_arrays();
  wire::AgentMessage message;
  for (const Array& array : arrays) {
    to_proto(array, message.mutable_action()->add_arrays());
  }
  EXPECT_EQ(bytes_of(encode_action(arrays, pool())), message.SerializeAsString());
}

TEST(Encode, NothingIsAStepToo) {
  EXPECT_EQ(bytes_of(encode_step({}, {}, pool())), bytes(2, ""));
  EXPECT_EQ(decode(bytes(2, "")).decoded.kind, Decoded::kStep);
}

TEST(Encode, PutsTheLargestArrayOnACacheLine) {
  for (int64_t size : {1000, 1001, 70000}) {
    const grpc::ByteBuffer buffer =
        encode_step({make_array({DType::kUint8, {3, 7}}),
                     make_array({DType::kUint8, {size}}, std::string(size, 'x')),
                     make_array({DType::kFloat32, {3}}, std::string(12, 'y'))},
                    {}, pool());
    std::vector<grpc::Slice> slices;
    ASSERT_TRUE(buffer.Dump(&slices).ok());
    ASSERT_EQ(slices.size(), 1u);
    const uint8_t* largest =
        std::search_n(slices[0].begin(), slices[0].end(), static_cast<int>(size), 'x');
    ASSERT_NE(largest, slices[0].end());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(largest) % 64, 0u);
  }
}

TEST(Encode, RefusesWhatNobodyWouldTake) {
  EXPECT_THROW(encode_step({Array()}, {}, pool()), std::invalid_argument);
  const Array one = make_array({DType::kBool, {}});
  EXPECT_EQ(refusal([&] { encode_action(std::vector<Array>(1025, one), pool()); }),
            "an action: 1025 arrays, at most 1024 are allowed");
  // No memory behind it, which is not looked at.
  uint8_t byte = 0;
  const Array large({DType::kUint8, {8, 32 << 20}}, &byte, nullptr);
  EXPECT_EQ(refusal([&] { encode_step({large}, {}, pool()); }),
            "a step: a message would have 268435483 bytes, at most 268435456 are "
            "allowed");
  const Array larger({DType::kFloat64, {8, 32 << 20}}, &byte, nullptr);
  EXPECT_EQ(refusal([&] { encode_step({larger}, {}, pool()); }),
            "a step: float64 [8, 33554432] is larger than a message may be, 268435456 "
            "bytes");
}

TEST(Encode, MemoryGoesBackToThePoolFromAnyThread) {
  const auto arrays = all_kinds_of_arrays();
  auto own_pool = std::make_unique<MemoryPool>();
  grpc::ByteBuffer first = encode_step(arrays, {}, *own_pool);
  const std::string bytes = bytes_of(first);
  const size_t one_message = own_pool->num_bytes();
  EXPECT_GE(one_message, bytes.size());
  for (int i = 0; i < 10; ++i) {
    grpc::ByteBuffer second = encode_step(arrays, {}, *own_pool);
    std::thread([&] { second.Clear(); }).join();
  }
  EXPECT_EQ(own_pool->num_bytes(), 2 * one_message);
  own_pool.reset();  // a message outlives it
  EXPECT_EQ(bytes_of(first), bytes);
}

TEST(Decode, ReadsWhatProtobufWritesInChunksOfAnySize) {
  const auto arrays = all_kinds_of_arrays();
  const std::vector<Array> final_observation = {arrays[5], arrays[2]};
  const std::string bytes = step_proto(arrays, final_observation).SerializeAsString();
  for (size_t chunk : {1, 2, 3, 7, 64, 1 << 20}) {
    const Step step = decode(bytes, chunk);
    EXPECT_EQ(step.decoded.kind, Decoded::kStep);
    expect_equal(step.arrays, arrays);
    expect_equal(step.final_observation, final_observation);
  }
}

TEST(Decode, ReadsActions) {
  std::vector<Array> arrays;
  grpc::ByteBuffer buffer = encode_action(all_kinds_of_arrays(), pool());
  const std::string bytes = bytes_of(buffer);
  const Decoded decoded = decode_agent_message(&buffer, collect(&arrays));
  EXPECT_EQ(decoded.kind, Decoded::kAction);
  EXPECT_EQ(decoded.num_arrays, arrays.size());
  wire::AgentMessage oracle;
  ASSERT_TRUE(oracle.ParseFromString(bytes));
  expect_equal(arrays, from_proto(oracle.action().arrays()));
}

TEST(Decode, ReadsOnlyItsOwnBytesOfAStream) {
  const std::string message = step_of(kDTypeUint8 + kShape3 + kDataAbc);
  const std::string stream = message + message;
  ArrayInputStream in(stream.data(), static_cast<int>(stream.size()), 4);
  for (int i = 0; i < 2; ++i) {
    std::vector<Array> arrays;
    decode_env_message(&in, static_cast<int64_t>(message.size()), collect(&arrays), {});
    ASSERT_EQ(arrays.size(), 1u);
    EXPECT_EQ(content(arrays[0]), "abc");
  }
}

TEST(Decode, ReadsEveryFormOfAShape) {
  const std::string data = bytes(3, "abcdef");
  const std::string forms[] = {
      bytes(2, varint(2) + varint(3)),                 // packed
      number(2, 2) + number(2, 3),                     // unpacked
      bytes(2, varint(2)) + bytes(2, varint(3)),       // packed in pieces
      number(2, 2) + bytes(2, "") + bytes(2, "\x03"),  // mixed
      bytes(2, std::string("\x82\x00\x03", 3)),        // a longer varint than needed
  };
  for (const std::string& form : forms) {
    const std::string bytes = step_of(kDTypeUint8 + form + data);
    const Step step = decode(bytes, 5);
    ASSERT_EQ(step.arrays.size(), 1u);
    EXPECT_EQ(step.arrays[0].spec().to_string(), "uint8 [2, 3]");
    EXPECT_EQ(content(step.arrays[0]), "abcdef");
    wire::EnvMessage oracle;
    ASSERT_TRUE(oracle.ParseFromString(bytes));
    expect_equal(step.arrays, from_proto(oracle.step().arrays()));
  }
}

TEST(Decode, SkipsUnknownFields) {
  const std::string unknown = number(4, 1) + bytes(15, "later") + tag(99, 1) +
                              "12345678" + tag(536870911, 5) + "1234";
  const std::string array =
      unknown + kDTypeUint8 + unknown + kShape3 + unknown + kDataAbc + unknown;
  const std::string scalar = kDTypeUint8 + bytes(3, "x");
  const std::string bytes_ =
      unknown +
      bytes(2, unknown + bytes(2, scalar) + unknown + bytes(1, array) +
                   bytes(2, scalar) + bytes(1, array) + unknown) +
      unknown;
  const Step step = decode(bytes_, 3);
  EXPECT_EQ(step.arrays.size(), 2u);
  EXPECT_EQ(step.final_observation.size(), 2u);
  wire::EnvMessage oracle;
  ASSERT_TRUE(oracle.ParseFromString(bytes_));
  expect_equal(step.arrays, from_proto(oracle.step().arrays()));
  expect_equal(step.final_observation, from_proto(oracle.step().final_observation()));
}

TEST(Decode, NoBytesNeedNoData) {
  const std::string shape_0 = bytes(2, varint(5) + varint(0));
  for (const std::string& data : {std::string(), bytes(3, "")}) {
    const Step step = decode(step_of(kDTypeUint8 + shape_0 + data));
    ASSERT_EQ(step.arrays.size(), 1u);
    EXPECT_EQ(step.arrays[0].spec().to_string(), "uint8 [5, 0]");
  }
  EXPECT_EQ(refusal([&] { decode(step_of(kDTypeUint8 + shape_0 + kDataAbc)); }),
            "step.arrays[0]: uint8 [5, 0] has 3 bytes of data, must have 0");
}

// --- What a peer may not send --------------------------------------------------------

TEST(Decode, RefusesWithAReason) {
  const std::string good = kDTypeUint8 + kShape3 + kDataAbc;
  const std::string order =
      "step.arrays[0]: dtype, shape and data must come in this order, dtype and data "
      "once";
  const std::string early = "malformed message: it ends in the middle of a field";
  const std::string none = "message: none of hello, step and error";
  const std::string several = "message: more than one of hello, step and error";
  const std::string group =
      "malformed message: field 9 has wire type 3, allowed are 0, "
      "1, 2 and 5";
  const std::pair<std::string, std::string> cases[] = {
      {"", none},
      {number(9, 9), none},
      {bytes(2, "") + bytes(2, ""), several},
      {bytes(1, "") + bytes(2, ""), several},
      {step_of(good) + bytes(3, ""), several},
      {number(2, 1), "message: field 2 has wire type 0, must be 2"},
      {bytes(2, number(1, 1)), "step.arrays[0]: field 1 has wire type 0, must be 2"},
      {bytes(2, bytes(1, good) + number(2, 1)),
       "step.final_observation[0]: field 2 has wire type 0, must be 2"},
      {bytes(2, bytes(3, "a")), "step: field 3 has wire type 2, must be 0"},
      {step_of(bytes(1, "\x02") + kShape3 + kDataAbc),
       "step.arrays[0]: field 1 has wire type 2, must be 0"},
      {step_of(kDTypeUint8 + tag(2, 1) + "12345678" + kDataAbc),
       "step.arrays[0]: field 2 has wire type 1, must be 2"},
      {step_of(kDTypeUint8 + kShape3 + number(3, 3)),
       "step.arrays[0]: field 3 has wire type 0, must be 2"},
      {step_of(kDTypeUint8 + kShape3 + tag(9, 3) + tag(9, 4)), group},
      {tag(9, 3) + tag(9, 4), group},
      {step_of(kDTypeUint8 + tag(9, 7)),
       "malformed message: field 9 has wire type 7, allowed are 0, 1, 2 and 5"},
      {step_of(number(0, 1)), "malformed message: no field has the tag 0"},
      {tag(uint64_t{1} << 30, 2), "malformed message: no field has the tag 8589934594"},
      {std::string(11, '\xFF'), early},  // a varint of more than ten bytes
      {step_of(kDTypeUint8 + tag(9, 1) + "1234567"), early},
      {step_of(kDTypeUint8 + tag(9, 5) + "123"), early},
      {step_of(kDTypeUint8 + tag(9, 2) + varint(4) + "123"),
       "malformed message: a length of 4 where 3 bytes remain"},
      // Dtypes.
      {step_of(""), "step.arrays[0]: dtype is missing"},
      {step_of(kShape3 + kDataAbc), "step.arrays[0]: dtype is missing"},
      {step_of(number(1, 0)), "step.arrays[0]: no such dtype: 0, allowed are 1 to 12"},
      {step_of(number(1, 13)),
       "step.arrays[0]: no such dtype: 13, allowed are 1 to 12"},
      {step_of(number(1, (uint64_t{1} << 32) + 2)),
       "step.arrays[0]: no such dtype: 4294967298, allowed are 1 to 12"},
      {step_of(number(1, ~uint64_t{0})),
       "step.arrays[0]: no such dtype: -1, allowed are 1 to 12"},
      // The order of an array's fields.
      {step_of(kDTypeUint8 + kDTypeUint8), order},
      {step_of(kDTypeUint8 + kShape3 + number(1, 3)), order},
      {step_of(good + kDTypeUint8), order},
      {step_of(good + kShape3), order},
      {step_of(good + kDataAbc), order},
      // Shapes.
      {step_of(kDTypeUint8 + bytes(2, std::string(9, '\1')) + bytes(3, "x")),
       "step.arrays[0]: more than 8 dimensions"},
      {step_of(kDTypeUint8 + bytes(2, std::string(8, '\1')) + number(2, 1)),
       "step.arrays[0]: more than 8 dimensions"},
      {step_of(kDTypeUint8 + bytes(2, varint(268435457))),
       "step.arrays[0]: a dimension of 268435457, at most 268435456 is allowed"},
      {step_of(kDTypeUint8 + bytes(2, varint(~uint64_t{0}))),
       "step.arrays[0]: a dimension of 18446744073709551615, at most 268435456 is "
       "allowed"},
      {step_of(kDTypeUint8 + bytes(2, varint(1 << 14) + varint((1 << 14) + 1))),
       "step.arrays[0]: uint8 [16384, 16385] is larger than a message may be, "
       "268435456 "
       "bytes"},
      {step_of(kDTypeUint8 + bytes(2, varint(1 << 28) + varint(0) + varint(2))),
       "step.arrays[0]: uint8 [268435456, 0, 2] is larger than a message may be, "
       "268435456 bytes"},
      // 2^64 bytes
      {step_of(number(1, 12) +
               bytes(2, varint(1 << 28) + varint(1 << 28) + varint(32))),
       "step.arrays[0]: float64 [268435456, 268435456, 32] is larger than a message "
       "may "
       "be, 268435456 bytes"},
      {step_of(kDTypeUint8 + bytes(2, "\x80")), early},
      // Data.
      {step_of(kDTypeUint8 + kShape3),
       "step.arrays[0]: uint8 [3] has 0 bytes of data, must have 3"},
      {step_of(kDTypeUint8 + kShape3 + bytes(3, "ab")),
       "step.arrays[0]: uint8 [3] has 2 bytes of data, must have 3"},
      {bytes(2, bytes(1, good) + bytes(1, kDTypeUint8 + kShape3 + bytes(3, "abcd"))),
       "step.arrays[1]: uint8 [3] has 4 bytes of data, must have 3"},
      {step_of(number(1, 11) + kShape3 + kDataAbc),
       "step.arrays[0]: float32 [3] has 3 bytes of data, must have 12"},
      {step_of(number(1, 1) + kShape3 + bytes(3, std::string("\0\1\2", 3))),
       "step.arrays[0]: a bool that is neither 0 nor 1"},
      {step_of(number(1, 1) + bytes(3, "\xFF")),
       "step.arrays[0]: a bool that is neither 0 nor 1"},
      // Handshakes and errors.
      {bytes(1, "\x0A"),
       "hello: can't be parsed: malformed, nested too deep, or with a text that is not "
       "UTF-8"},
      {bytes(1, tag(9, 4)),
       "hello: can't be parsed: malformed, nested too deep, or with a text that is not "
       "UTF-8"},
      {bytes(1, bytes(2, "\xFF")),
       "hello: can't be parsed: malformed, nested too deep, or with a text that is not "
       "UTF-8"},
      {bytes(1, std::string((4 << 20) + 1, '\0')),
       "hello: 4194305 bytes, at most 4194304 are allowed"},
      {bytes(3, std::string((1 << 20) + 1, '\0')),
       "error: 1048577 bytes, at most 1048576 are allowed"},
  };
  for (const auto& [message, reason] : cases) {
    for (size_t chunk : {size_t{1} << 24, size_t{3}}) {
      if (message.size() > 1000 && chunk == 3) continue;
      const std::string& sent = message;
      EXPECT_EQ(refusal([&] { decode(sent, chunk); }), reason);
    }
  }
}

TEST(Decode, RefusesInAgentMessagesToo) {
  const auto reason = [](const std::string& bytes) {
    return refusal([&] {
      grpc::ByteBuffer buffer = buffer_of(bytes);
      std::vector<Array> arrays;
      decode_agent_message(&buffer, collect(&arrays));
    });
  };
  EXPECT_EQ(reason(bytes(2, "") + bytes(1, "")),
            "message: more than one of hello and action");
  EXPECT_EQ(reason(bytes(3, "")), "message: none of hello and action");
  EXPECT_EQ(reason(bytes(2, bytes(2, ""))), "accepted");  // no final observation here
  EXPECT_EQ(reason(bytes(2, bytes(1, kDTypeUint8 + kShape3))),
            "action.arrays[0]: uint8 [3] has 0 bytes of data, must have 3");
  grpc::ByteBuffer nothing;
  EXPECT_EQ(refusal([&] { decode_agent_message(&nothing, {}); }),
            "message: no bytes at all");
}

TEST(Decode, CountsArrays) {
  const std::string scalar = bytes(1, kDTypeUint8 + bytes(3, "x"));
  std::string list;
  for (int i = 0; i < 1024; ++i) list += scalar;
  EXPECT_EQ(decode(bytes(2, list)).arrays.size(), 1024u);
  EXPECT_EQ(refusal([&] { decode(bytes(2, list + scalar)); }),
            "step.arrays[1024]: more than 1024 arrays, which is the most allowed");
}

TEST(Decode, BoundsAMessage) {
  ArrayInputStream in("", 0);
  for (int64_t size : {int64_t{-1}, kMaxMessageBytes + 1}) {
    EXPECT_EQ(
        refusal([&] { decode_env_message(&in, size, {}, {}); }),
        "message: " + std::to_string(size) + " bytes, at most 268435456 are allowed");
  }
}

// No memory is asked for before all of the array's bytes are known to be there.
TEST(Decode, AsksForADestinationOnlyOnceTheBytesAreThere) {
  bool asked = false;
  const Destination destination = [&](size_t, const ArraySpec& spec) {
    asked = true;
    return pool().allocate(spec);
  };
  const std::string shape = bytes(2, varint(8) + varint(1 << 20));
  const std::string data = tag(3, 2) + varint(8 << 20) + "few";
  for (const std::string& bytes_ :
       {step_of(kDTypeUint8 + shape + data), step_of(kDTypeUint8 + shape),
        step_of(kDTypeUint8 + shape + bytes(3, "few"))}) {
    grpc::ByteBuffer buffer = buffer_of(bytes_);
    EXPECT_THROW(decode_env_message(&buffer, destination, destination), WireError);
    EXPECT_FALSE(asked);
  }
}

TEST(Decode, TrustsItsDestinationNoMoreThanThePeer) {
  const std::string message = step_of(kDTypeUint8 + kShape3 + kDataAbc);
  const auto decode_into = [&](const Destination& destination) {
    grpc::ByteBuffer buffer = buffer_of(message);
    decode_env_message(&buffer, destination, {});
  };
  const Array small = make_array({DType::kUint8, {2}});
  EXPECT_THROW(decode_into([&](size_t, const ArraySpec&) { return small; }),
               std::logic_error);
  EXPECT_THROW(decode_into([&](size_t, const ArraySpec& spec) {
                 return Array(spec, nullptr, nullptr);
               }),
               std::logic_error);
  EXPECT_EQ(refusal([&] { decode_into(nullptr); }),
            "step.arrays[0]: no arrays are expected here");
}

// Numbers may be longer than they need; protobuf sets a limit to tags and lengths.
TEST(Decode, TakesLongVarintsAsProtobufDoes) {
  for (size_t size = 2; size <= 10; ++size) {
    const auto padded = [&](uint64_t value) {
      std::string bytes(1, static_cast<char>(value | 0x80));
      return bytes + std::string(size - 2, '\x80') + std::string(1, '\0');
    };
    const std::string array = kDTypeUint8 + kShape3 + kDataAbc;
    for (const std::string& message :
         {padded(0x12) + varint(0),
          bytes(2, padded(0x0A) + varint(array.size()) + array), tag(2, 2) + padded(0),
          step_of(kDTypeUint8 + kShape3 + tag(3, 2) + padded(3) + "abc"),
          step_of(kDTypeUint8 + tag(2, 2) + padded(1) + "\x03" + kDataAbc),
          bytes(2, tag(9, 2) + padded(1) + "x"),
          step_of(tag(1, 0) + padded(2) + kShape3 + kDataAbc),
          step_of(kDTypeUint8 + bytes(2, padded(3)) + kDataAbc)}) {
      wire::EnvMessage oracle;
      EXPECT_EQ(refusal([&] { decode(message, 3); }) == "accepted",
                oracle.ParseFromString(message))
          << testing::PrintToString(message);
    }
  }
  EXPECT_EQ(refusal([&] { decode(std::string("\x12\x80\x80\x80\x80\x80\0", 7)); }),
            "malformed message: a tag or length of more than 5 bytes");
}

TEST(Decode, FindsABadBoolAnywhere) {
  for (size_t size : {1, 7, 8, 9, 31}) {
    for (size_t i = 0; i < size; ++i) {
      for (const char value : {'\1', '\2', '\x80'}) {
        std::string data(size, '\1');
        data[i] = value;
        const std::string message =
            step_of(number(1, 1) + number(2, size) + bytes(3, data));
        EXPECT_EQ(refusal([&] { decode(message); }) == "accepted", value == 1);
      }
    }
  }
}

// What a damaged message does: a WireError, or what protobuf reads in it.
void expect_refused_or_as_protobuf(const std::string& bytes, size_t chunk) {
  Step step;
  try {
    step = decode(bytes, chunk);
  } catch (const WireError&) {
    return;
  }
  wire::EnvMessage oracle;
  ASSERT_TRUE(oracle.ParseFromString(bytes));
  EXPECT_EQ(step.decoded.kind, oracle.has_step()    ? Decoded::kStep
                               : oracle.has_hello() ? Decoded::kHello
                                                    : Decoded::kError);
  expect_equal(step.arrays, from_proto(oracle.step().arrays()));
  expect_equal(step.final_observation, from_proto(oracle.step().final_observation()));
  EXPECT_EQ(step.decoded.error, oracle.error().message());
  EXPECT_EQ(step.decoded.env_hello.SerializeAsString(),
            oracle.hello().SerializeAsString());
}

std::string small_step() {
  return bytes_of(encode_step(
      {make_array({DType::kUint8, {3, 5, 2}}), make_array({DType::kBool, {3}}),
       make_array({DType::kInt64, {}}), make_array({DType::kFloat32, {0, 3}})},
      {make_array({DType::kUint8, {3, 2}})}, pool()));
}

TEST(Decode, SurvivesTruncationAnywhere) {
  const std::string whole = small_step();
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string part = whole.substr(0, size);
    EXPECT_NE(refusal([&] { decode(part, 5); }), "accepted");
    // A stream that ends before the message does.
    EXPECT_NE(refusal([&] {
                ArrayInputStream in(part.data(), static_cast<int>(size), 5);
                std::vector<Array> arrays;
                std::vector<Array> final_observation;
                decode_env_message(&in, static_cast<int64_t>(whole.size()),
                                   collect(&arrays), collect(&final_observation));
              }),
              "accepted");
  }
}

TEST(Decode, SurvivesAnyByteBeingAnyOther) {
  const std::string whole = small_step();
  for (size_t i = 0; i < whole.size(); ++i) {
    for (int change = 1; change < 256; ++change) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ change);
      expect_refused_or_as_protobuf(damaged, change % 7 + 1);
    }
  }
}

TEST(Decode, SurvivesBytesGoneOrDoubled) {
  const std::string whole = small_step();
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

TEST(Decode, SurvivesLengthsThatLie) {
  const std::string array = kDTypeUint8 + kShape3 + kDataAbc;
  // Of data, shape, array and step.
  const auto message = [&](uint64_t data, uint64_t shape, uint64_t arr, uint64_t step) {
    return tag(2, 2) + varint(step) + tag(1, 2) + varint(arr) + kDTypeUint8 +
           tag(2, 2) + varint(shape) + varint(3) + tag(3, 2) + varint(data) + "abc";
  };
  const uint64_t size = array.size();
  const auto step_size = [&](uint64_t arr) { return size + 1 + varint(arr).size(); };
  ASSERT_EQ(message(3, 1, size, size + 2), step_of(array));
  for (uint64_t lie :
       {uint64_t{0}, uint64_t{2}, uint64_t{4}, uint64_t{100}, (uint64_t{1} << 31) - 1,
        uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 63, ~uint64_t{0}}) {
    const uint64_t more = varint(lie).size() - 1;
    EXPECT_NE(refusal([&] { decode(message(lie, 1, size + more, size + more + 2)); }),
              "accepted");
    EXPECT_NE(refusal([&] { decode(message(3, lie, size + more, size + more + 2)); }),
              "accepted");
    EXPECT_NE(refusal([&] { decode(message(3, 1, lie, step_size(lie))); }), "accepted");
    EXPECT_NE(refusal([&] { decode(message(3, 1, size, lie)); }), "accepted");
  }
}

// --- Destinations --------------------------------------------------------------------

TEST(Expect, TakesJustWhatWasAnnounced) {
  const std::vector<ArraySpec> expected = {{DType::kUint8, {3, 2}},
                                           {DType::kFloat32, {3}}};
  std::vector<Array> arrays;
  for (const ArraySpec& spec : expected) arrays.push_back(make_array(spec));
  const Destination destination = expect(expected, arrays, "step");
  const auto send = [&](const std::vector<Array>& sent) {
    grpc::ByteBuffer buffer = encode_step(sent, {}, pool());
    return decode_env_message(&buffer, destination, {}).num_arrays;
  };
  const Array a = make_array(expected[0]);
  const Array b = make_array(expected[1]);
  EXPECT_EQ(send({a, b}), 2u);
  expect_equal(arrays, {a, b});
  EXPECT_EQ(send({a}), 1u);  // the caller looks at the number
  EXPECT_EQ(refusal([&] {
              send({a, b, b});
            }),
            "step: more arrays than the 2 announced");
  EXPECT_EQ(refusal([&] {
              send({make_array({DType::kUint8, {2, 3}}), b});
            }),
            "step: array 0 is uint8 [2, 3], announced was uint8 [3, 2]");
  EXPECT_EQ(refusal([&] {
              send({b, a});
            }),
            "step: array 0 is float32 [3], announced was uint8 [3, 2]");
  EXPECT_EQ(refusal([&] {
              send({a, make_array({DType::kInt32, {3}})});
            }),
            "step: array 1 is int32 [3], announced was float32 [3]");
  EXPECT_THROW(expect(expected, {a}, "step"), std::invalid_argument);
}

TEST(AcceptAny, TakesArraysOfAllEnvironments) {
  const Array a = make_array({DType::kInt64, {3}});
  const Array b = make_array({DType::kFloat32, {3, 7}});
  const auto send = [&](const std::vector<Array>& sent) {
    std::vector<Array> arrays;
    grpc::ByteBuffer buffer = encode_action(sent, pool());
    decode_agent_message(&buffer, accept_any(3, pool(), &arrays));
    return arrays;
  };
  expect_equal(send({a, b}), {a, b});
  EXPECT_EQ(refusal([&] {
              send({a, make_array({DType::kInt64, {4, 3}})});
            }),
            "array 1: is int64 [4, 3], its first dimension must be 3, the number of "
            "environments");
  EXPECT_EQ(refusal([&] {
              send({make_array({DType::kInt64, {}})});
            }),
            "array 0: is int64 [], its first dimension must be 3, the number of "
            "environments");
}

// --- Handshakes and errors -----------------------------------------------------------

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
  hello.set_version(1);
  hello.set_environment("Mock-v0");
  hello.set_num_envs(num_envs);
  *hello.mutable_observation_space() = observation;
  return hello;
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

TEST(Hello, GoesThrough) {
  wire::EnvMessage env;
  *env.mutable_hello() = hello_of(discrete(7));
  add_setting(env.mutable_hello(), "sticky_actions", "0.25");
  grpc::ByteBuffer buffer = encode(env);
  const Decoded from_env = decode_env_message(&buffer, {}, {});
  EXPECT_EQ(from_env.kind, Decoded::kHello);
  EXPECT_EQ(from_env.env_hello.SerializeAsString(), env.hello().SerializeAsString());

  wire::AgentMessage agent;
  agent.mutable_hello()->set_version(5);
  agent.mutable_hello()->mutable_seeding()->set_seed(~uint64_t{0});
  agent.mutable_hello()->mutable_seeding()->set_stream(3);
  buffer = encode(agent);
  const Decoded from_agent = decode_agent_message(&buffer, {});
  EXPECT_EQ(from_agent.kind, Decoded::kHello);
  EXPECT_EQ(from_agent.agent_hello.SerializeAsString(),
            agent.hello().SerializeAsString());
}

TEST(Hello, SettingsKeepTheRules) {
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
            "setting \"a\": the value has 1025 bytes, at most 1024 are allowed");
  EXPECT_EQ(reason("a", "\xff", 1), "setting \"a\": the value is not UTF-8");
  EXPECT_EQ(reason("a", "1", 1025), "hello: 1025 settings, at most 1024 are allowed");
}

TEST(Hello, IsNotEncodedIfNobodyWouldTakeIt) {
  wire::EnvMessage env;
  EXPECT_THROW(encode(env), std::invalid_argument);
  EXPECT_THROW(encode(wire::AgentMessage()), std::invalid_argument);
  *env.mutable_hello() = hello_of(box(wire::UINT8, {1 << 20}));
  for (int i = 0; i < 1 << 20; ++i) {
    env.mutable_hello()->mutable_observation_space()->mutable_box()->add_low(0);
  }
  EXPECT_NE(refusal([&] { encode(env); }).find("at most 4194304 are allowed"),
            std::string::npos);
}

TEST(Hello, DeepNestingDoesNotOverflowTheStack) {
  const auto reason = [](int levels) {
    std::string space = bytes(5, "");
    for (int i = 1; i < levels; ++i) space = bytes(5, bytes(1, space));
    return refusal([&] {
      const Step step = decode(bytes(1, number(1, 1) + number(3, 1) + bytes(4, space)));
      const StreamSpec spec(step.decoded.env_hello);
    });
  };
  EXPECT_NE(reason(17).find("nested deeper than 16 levels"), std::string::npos);
  EXPECT_NE(reason(30).find("nested deeper than 16 levels"), std::string::npos);
  for (int levels : {40, 100, 10000}) {
    EXPECT_EQ(reason(levels),
              "hello: can't be parsed: malformed, nested too deep, or with a text that "
              "is not UTF-8");
  }
}

TEST(Error, CarriesAnyText) {
  const auto sent = [](const std::string& text) {
    grpc::ByteBuffer buffer = encode_error(text);
    wire::EnvMessage oracle;  // which insists on UTF-8
    EXPECT_TRUE(oracle.ParseFromString(bytes_of(buffer)));
    const Decoded decoded = decode_env_message(&buffer, {}, {});
    EXPECT_EQ(decoded.kind, Decoded::kError);
    EXPECT_EQ(decoded.error, oracle.error().message());
    return decoded.error;
  };
  EXPECT_EQ(sent(""), "");
  const std::string text = "Traceback: \xC3\xA9 \xE2\x82\xAC \xF0\x9F\x90\x99\n";
  EXPECT_EQ(sent(text), text);
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(sent("a\xFF"
                 "b"),
            "a" + bad + "b");
  EXPECT_EQ(sent("\xED\xA0\x80"), bad + bad + bad);            // a surrogate
  EXPECT_EQ(sent("\xC0\x80"), bad + bad);                      // overlong
  EXPECT_EQ(sent("\xE0\x80\x80"), bad + bad + bad);            // overlong
  EXPECT_EQ(sent("\xF4\x90\x80\x80"), bad + bad + bad + bad);  // past U+10FFFF
  EXPECT_EQ(sent("\xE2\x82"), bad + bad);                      // ends early
  EXPECT_EQ(sent("\xF0\x90\x80\x80"), "\xF0\x90\x80\x80");
  EXPECT_EQ(sent("\xEE\x80\x80\xED\x9F\xBF"), "\xEE\x80\x80\xED\x9F\xBF");

  const std::string cut = sent("first " + std::string(1 << 20, '\xFF') + " last");
  EXPECT_EQ(cut.substr(0, 6), "first ");
  EXPECT_EQ(cut.substr(cut.size() - 5), " last");
  EXPECT_NE(cut.find("\n[...]\n"), std::string::npos);
  EXPECT_LT(cut.size(), 200u << 10);

  wire::EnvMessage message;
  message.mutable_error()->set_message("\xFF");
  EXPECT_EQ(bytes_of(encode(message)), bytes_of(encode_error("\xFF")));
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
  EXPECT_EQ(spec.environment, "Mock-v0");
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
  EXPECT_EQ(spec.extra_fields, (std::vector<std::string>{"truncated", "lives"}));
  EXPECT_EQ(
      spec.observation.dict().at("inner").vector()[0].dict().at("b").leaf().to_string(),
      "float64 [3, 2]");
  ASSERT_TRUE(spec.has_action);
  EXPECT_EQ(spec.action.vector()[0].leaf().to_string(), "int64 [3]");
  EXPECT_EQ(spec.action.vector()[1].leaf().to_string(), "int64 [3, 2]");

  hello.clear_action_space();
  EXPECT_FALSE(StreamSpec(hello).has_action);
}

TEST(StreamSpecTest, RefusesWithAReason) {
  const auto reason = [](const std::function<void(wire::EnvHello*)>& change) {
    wire::EnvHello hello = hello_of(box(wire::UINT8, {5, 7}));
    change(&hello);
    return refusal([&] { const StreamSpec spec(hello); });
  };
  EXPECT_EQ(reason([](auto*) {}), "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_version(2); }),
            "hello: version 2 of the protocol; this side speaks version 1");
  EXPECT_EQ(reason([](auto* hello) { hello->set_num_envs(0); }),
            "hello: num_envs is 0, allowed are 1 to 16384");
  EXPECT_EQ(reason([](auto* hello) { hello->set_num_envs(16385); }),
            "hello: num_envs is 16385, allowed are 1 to 16384");
  EXPECT_EQ(reason([](auto* hello) { hello->set_num_envs(16384); }), "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_environment(std::string(1024, 'x')); }),
            "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_environment(std::string(1025, 'x')); }),
            "hello.environment: the name \"" + std::string(64, 'x') +
                "...\" has 1025 bytes, at most 1024 are allowed");
  EXPECT_EQ(reason([](auto* hello) { hello->set_environment("a\n\xFF"); }),
            "hello.environment: the name \"a?\xEF\xBF\xBD\" is not UTF-8");
  EXPECT_EQ(reason([](auto* hello) { hello->set_stream_id(std::string(64, '\0')); }),
            "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_stream_id(std::string(65, 'x')); }),
            "hello.stream_id: 65 bytes, at most 64 are allowed");
  EXPECT_EQ(reason([](auto* hello) { hello->set_first_step((uint64_t{1} << 63) - 1); }),
            "accepted");
  EXPECT_EQ(reason([](auto* hello) { hello->set_first_step(uint64_t{1} << 63); }),
            "hello.first_step: is 9223372036854775808, at most 9223372036854775807 is "
            "allowed");
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
            "extra field \"count\": more than 6 dimensions");
  EXPECT_EQ(field("count", wire::DTYPE_UNSPECIFIED, {}),
            "extra field \"count\": no such dtype: 0, allowed are 1 to 12");
  EXPECT_EQ(field("count", static_cast<wire::DType>(-1), {}),
            "extra field \"count\": no such dtype: -1, allowed are 1 to 12");
  EXPECT_EQ(field("", wire::INT8, {}), "extra field \"\": the name is empty");
  EXPECT_EQ(field("lives", wire::INT8, {}),
            "extra field \"lives\": the name comes twice");
  for (const std::string name :
       {"observation", "reward", "done", "episode_step", "episode_return"}) {
    EXPECT_EQ(field(name, wire::INT8, {}),
              "extra field \"" + name + "\": the name is taken by the step");
  }
  EXPECT_EQ(field("\xC3", wire::INT8, {}),
            "extra field: the name \"\xEF\xBF\xBD\" is not UTF-8");
  EXPECT_EQ(reason([](auto* hello) {
              for (int i = 0; i < 1025; ++i) hello->add_extra_fields();
            }),
            "hello: 1025 extra fields, where a step has at most 1024 arrays");
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
            "a step of 3 environments: 1025 arrays, at most 1024 are allowed");
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
      const std::vector<int64_t>& low = spec.rules[k].low;
      if (!low.empty()) arrays[k].as<int64_t>()[n] = low[n % low.size()];
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
      "; allowed are finite numbers of at most 1e+09 in magnitude";

  EXPECT_EQ(value_refusal<uint8_t>(hello, kU8, 0, 255), "accepted");
  EXPECT_EQ(value_refusal<int64_t>(hello, kD, 0, 2), "accepted");
  EXPECT_EQ(value_refusal<int64_t>(hello, kD, 1, 3),
            "observation[\"d\"]: 3 in environment 1; allowed are -1 to 2");
  EXPECT_EQ(value_refusal<int64_t>(hello, kD, 2, -2),
            "observation[\"d\"]: -2 in environment 2; allowed are -1 to 2");
  EXPECT_EQ(value_refusal<int8_t>(hello, kB, 11, 2),
            "observation[\"b\"]: 2 in environment 1, element 0; allowed are 0 and 1");
  EXPECT_EQ(value_refusal<int64_t>(hello, kM, 5, 3), "accepted");
  EXPECT_EQ(value_refusal<int64_t>(hello, kM, 5, 4),
            "observation[\"m\"]: 4 in environment 2, element 1; allowed are -3 to 3");
  EXPECT_EQ(value_refusal<float>(hello, kF32, 26, 1e9f), "accepted");
  EXPECT_EQ(value_refusal<float>(hello, kF32, 26, 1e38f),
            "observation[\"f32\"]: 1e+38 in environment 2, element 8" + magnitude);
  EXPECT_EQ(value_refusal<float>(hello, kF32, 0, std::nanf("")),
            "observation[\"f32\"]: nan in environment 0, element 0" + magnitude);
  EXPECT_EQ(value_refusal<double>(hello, kF64, 1, -1.1e9),
            "observation[\"f64\"]: -1.1e+09 in environment 1" + magnitude);
  EXPECT_EQ(value_refusal<uint16_t>(hello, kF16, 1, 0x7BFF), "accepted");
  EXPECT_EQ(value_refusal<uint16_t>(hello, kF16, 1, 0xFC00),
            "observation[\"f16\"]: infinite in environment 0, element 1" + magnitude);
  EXPECT_EQ(value_refusal<uint16_t>(hello, kF16, 1, 0x7C01),
            "observation[\"f16\"]: nan in environment 0, element 1" + magnitude);
  EXPECT_EQ(value_refusal<int64_t>(hello, kWide, 3, int64_t{1} << 62),
            "observation[\"wide\"]: 4611686018427387904 in environment 1, element 1" +
                magnitude);
  EXPECT_EQ(value_refusal<uint64_t>(hello, kBounded, 0, 1'000'000'000'000), "accepted");
  EXPECT_NE(value_refusal<uint64_t>(hello, kBounded, 0, 1'000'000'000'001), "accepted");
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
  const auto reason = [](const wire::Space& space) {
    return refusal([&] { space_spec(space, 3, "observation", SpaceOf::kObservation); });
  };
  const auto inside = [&](const wire::Space& space) {
    const wire::Space outer = dict({{"camera", tuple({space})}, {"x", discrete(2)}});
    const std::string text = reason(outer);
    const std::string place = "observation[\"camera\"][0]: ";
    EXPECT_EQ(text.substr(0, place.size()), place);
    return text.substr(std::min(text.size(), place.size()));
  };

  // Shapes and dtypes.
  EXPECT_EQ(reason(box(wire::UINT8, {1, 2, 3, 4, 5, 6})), "accepted");
  EXPECT_EQ(inside(box(wire::UINT8, {1, 2, 3, 4, 5, 6, 7})), "more than 6 dimensions");
  EXPECT_EQ(inside(box(static_cast<wire::DType>(13), {1})),
            "no such dtype: 13, allowed are 1 to 12");
  EXPECT_EQ(inside(box(wire::UINT8, {~uint64_t{0}})),
            "a dimension of 18446744073709551615, at most 268435456 is allowed");
  EXPECT_EQ(inside(box(wire::FLOAT64, {1 << 26})),
            "float64 [3, 67108864] is larger than a message may be, 268435456 bytes");
  EXPECT_EQ(inside(box(wire::FLOAT64, {1 << 28, 1 << 28, 1 << 28, 0})),
            "float64 [3, 268435456, 268435456, 268435456, 0] is larger than a message "
            "may be, 268435456 bytes");
  wire::Space space;
  for (int i = 0; i < 7; ++i) space.mutable_multi_binary()->add_shape(1);
  EXPECT_EQ(inside(space), "more than 6 dimensions");

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
            "high");
  EXPECT_EQ(inside(bounded({std::nan("")}, {})),
            "Box with bounds nan to inf of element 0; low must be at most high");
  wire::Space no_elements = box(wire::FLOAT32, {0});
  no_elements.mutable_box()->add_low(1);
  EXPECT_EQ(reason(no_elements), "accepted");
  EXPECT_EQ(inside(bounded({inf}, {})),
            "Box with bounds inf to inf of element 0; nothing lies between");
  EXPECT_EQ(inside(bounded({}, {-inf})),
            "Box with bounds -inf to -inf of element 0; nothing lies between");
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
            "observation: Box with bounds -1.000000 to 255.000000 of element 0; one is "
            "outside of the dtype, uint8");
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
            "the space has 1048577 elements or more, at most 1048576 are allowed");
  EXPECT_EQ(inside(discrete((1 << 18) + 1)),
            "n is 262145, and all n of a space together may be at most 262144");
  EXPECT_EQ(reason(tuple({discrete(1 << 17), discrete((1 << 17) + 1)})),
            "observation[1]: n is 131073, and all n of a space together may be at most "
            "262144");
  EXPECT_EQ(refusal([&] {
              space_spec(discrete((1 << 16) + 1), 1, "action", SpaceOf::kAction);
            }),
            "action: n is 65537, and all n of a space together may be at most 65536");

  // Discrete ones.
  EXPECT_EQ(inside(discrete(0)), "n is 0, must be 1 or more");
  EXPECT_EQ(inside(discrete(-3)), "n is -3, must be 1 or more");
  const int64_t max = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(reason(discrete(1, max)), "accepted");
  EXPECT_EQ(reason(discrete(1 << 18, -max)), "accepted");
  EXPECT_EQ(inside(discrete(2, max)), "start 9223372036854775807 and n 2 exceed int64");
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
            "observation[1]: start 9223372036854775807 and n 7 exceed int64");

  // Dicts and tuples.
  wire::Space uneven = dict({{"a", discrete(2)}});
  uneven.mutable_dict()->add_keys("b");
  EXPECT_EQ(inside(uneven),
            "Dict with 2 keys and 1 values; there must be as many of both");
  EXPECT_EQ(inside(dict({{"a", discrete(2)}, {"a", discrete(2)}})),
            "the key \"a\" comes twice");
  EXPECT_EQ(inside(dict({{std::string(1025, 'k'), discrete(2)}})),
            "the name \"" + std::string(64, 'k') +
                "...\" has 1025 bytes, at most 1024 are allowed");
  EXPECT_EQ(inside(dict({{"\xF0", discrete(2)}})),
            "the name \"\xEF\xBF\xBD\" is not UTF-8");
  EXPECT_EQ(reason(tuple({})), "observation: the space has no array at all");
  EXPECT_EQ(reason(dict({{"a", tuple({})}})),
            "observation: the space has no array at all");
  EXPECT_EQ(refusal([&] { space_spec(discrete(2), 0, "action", SpaceOf::kAction); }),
            "action: 0 environments, allowed are 1 to 16384");
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
      EXPECT_EQ(
          space_spec(nested, 3, "observation", SpaceOf::kObservation).num_leaves(), 1u);
    }
    nested = wrap(level, nested);
    place = (level % 2 == 0 ? "[0]" : "[\"k\"]") + place;
  }
  EXPECT_EQ(
      refusal([&] { space_spec(nested, 3, "observation", SpaceOf::kObservation); }),
      "observation" + place +
          ": spaces are nested deeper than 16 levels, which is the most allowed");

  std::vector<wire::Space> items(1023, discrete(2));
  items.push_back(dict({}));
  EXPECT_EQ(
      space_spec(tuple(items), 3, "observation", SpaceOf::kObservation).num_leaves(),
      1023u);
  items.push_back(tuple({}));
  EXPECT_EQ(refusal([&] {
              space_spec(tuple(items), 3, "observation", SpaceOf::kObservation);
            }),
            "observation[1024]: the space has more than 1024 arrays, which is the most "
            "allowed");
}

}  // namespace
}  // namespace torchbeast
