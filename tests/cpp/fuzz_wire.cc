// libFuzzer target of the codec and of the hello's rules: a message is refused with a
// WireError, or it holds what protobuf's generated classes read in it. A step or action
// of the right sizes that these classes have written is not refused.
//
// The first byte of the input chooses the message (see Kind), the second the size of
// the chunks that the rest, the message, is delivered in; 0: one chunk.
//
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined ... fuzz_wire.cc
//   ./fuzz_wire tests/cpp/corpus

#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/unknown_field_set.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "codec.h"
#include "messages.h"

namespace torchbeast {
namespace {

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

enum Kind : uint8_t { kEnvHello = 0, kAgentHello = 1, kStep = 2, kAction = 3, kKinds };

// E = 2; uint8 [3], bool [], float32 [0] are observed, and int64 [] is the action.
wire::EnvHello make_hello() {
  wire::EnvHello hello;
  hello.set_version(kWireVersion);
  hello.set_num_envs(2);
  auto* spaces = hello.mutable_observation_space()->mutable_tuple();
  const auto add = [&](wire::DType dtype) {
    spaces->add_items()->mutable_box()->set_dtype(dtype);
    return spaces->mutable_items(spaces->items_size() - 1)->mutable_box();
  };
  add(wire::UINT8)->add_shape(3);
  add(wire::BOOL);
  add(wire::FLOAT32)->add_shape(0);
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

MemoryPool& pool() {
  static MemoryPool pool;
  return pool;
}

// Memory of its exact size, so that AddressSanitizer sees a byte too many. (Blocks of a
// pool are larger than their arrays.)
std::vector<Array> exact(const std::vector<ArraySpec>& specs) {
  std::vector<Array> arrays;
  for (const ArraySpec& spec : specs) {
    const auto data = std::make_shared<std::vector<uint8_t>>(spec.num_bytes());
    arrays.emplace_back(spec, data->data(), data);
  }
  return arrays;
}

std::string content(const std::vector<Array>& arrays) {
  std::string bytes;
  for (const Array& array : arrays) {
    bytes += std::string(array.as<const char>(), array.num_bytes());
  }
  return bytes;
}

// Whether `bytes` are good for arrays of these specs.
bool fits(const std::string& bytes, const std::vector<ArraySpec>& specs) {
  size_t i = 0;
  for (const ArraySpec& spec : specs) {
    const std::string own = bytes.substr(std::min(i, bytes.size()), spec.num_bytes());
    const auto is_bool = [](char c) { return c == 0 || c == 1; };
    if (spec.dtype == DType::kBool && !std::all_of(own.begin(), own.end(), is_bool)) {
      return false;
    }
    i += spec.num_bytes();
  }
  return i == bytes.size();
}

// What a generated class reads; nothing if it can't.
template <typename Message>
std::optional<Message> parse(const std::string& bytes) {
  Message message;
  if (!message.ParseFromString(bytes)) return std::nullopt;
  return message;
}

bool has_known_fields(const google::protobuf::Message& message) {
  return message.GetReflection()->GetUnknownFields(message).empty();
}

void check_limits(const StreamSpec& spec) {
  CHECK(spec.num_envs >= 1 && spec.num_envs <= kMaxEnvs);
  CHECK(spec.num_observation_arrays >= 1);
  CHECK(spec.num_observation_arrays == spec.observation.num_leaves());
  CHECK(spec.arrays.size() >= spec.num_observation_arrays + kStandardFields);
  CHECK(spec.arrays.size() <= static_cast<size_t>(kMaxArrays));
  CHECK(spec.names.size() == spec.arrays.size());
  CHECK(spec.rules.size() == spec.arrays.size());
  CHECK(spec.action.empty() == !spec.has_action_space);
  size_t bytes = 0;
  for (size_t i = 0; i < spec.arrays.size(); ++i) {
    const ArraySpec& array = spec.arrays[i];
    CHECK(array.shape.size() >= 1 && array.shape.size() <= kMaxSpaceDims + 1);
    CHECK(array.shape[0] == spec.num_envs);
    bytes += array.num_bytes();
    const ValueRule& rule = spec.rules[i];
    CHECK(rule.low.size() == rule.high.size());
    CHECK(rule.low.size() <= 1 ||
          rule.low.size() * static_cast<size_t>(spec.num_envs) == array.num_elements());
    for (size_t k = 0; k < rule.low.size(); ++k) CHECK(rule.low[k] <= rule.high[k]);
  }
  CHECK(bytes <= static_cast<size_t>(kMaxMessageBytes));
}

void check_step(const std::string& message, size_t chunk) {
  const auto oracle = parse<wire::EnvMessage>(message);
  const bool is_canonical = oracle && oracle->has_step() &&
                            oracle->SerializeAsString() == message &&
                            has_known_fields(*oracle);
  const std::string& final_bytes =
      is_canonical ? oracle->step().final_observation() : std::string();
  const bool must_fit =
      is_canonical && fits(oracle->step().arrays(), spec().arrays) &&
      (final_bytes.empty() || fits(final_bytes, spec().observation.flatten()));
  EnvRow row;
  row.arrays = exact(spec().arrays);
  std::optional<std::string> error;
  try {
    grpc::ByteBuffer buffer = buffer_of(message, chunk);
    error = decode_step(&buffer, spec(), pool(), &row);
  } catch (const WireError&) {
    CHECK(!must_fit);
    throw;
  }
  if (error) {
    CHECK(oracle && oracle->has_error() && oracle->error().message() == *error);
    const auto again = parse<wire::EnvMessage>(bytes_of(encode_error(*error)));
    // A long text is cut.
    CHECK(again && (again->error().message() == *error || error->size() > 60000));
    return;
  }
  wire::EnvMessage equal;
  equal.mutable_step()->set_arrays(content(row.arrays));
  equal.mutable_step()->set_final_observation(content(row.final_observation));
  equal.mutable_step()->set_env_nanoseconds(row.env_nanoseconds);
  equal.mutable_step()->set_action_number(row.action_number);
  CHECK(bytes_of(encode_step(row, pool())) == equal.SerializeAsString());
  if (!oracle) return;  // generated classes take fewer forms of a length
  CHECK(oracle->step().arrays() == equal.step().arrays());
  CHECK(oracle->step().final_observation() == equal.step().final_observation());
  CHECK(oracle->step().env_nanoseconds() == row.env_nanoseconds);
  CHECK(oracle->step().action_number() == row.action_number);
}

void check_action(const std::string& message, size_t chunk) {
  const auto oracle = parse<wire::AgentMessage>(message);
  const bool must_fit = oracle && oracle->has_action() &&
                        oracle->SerializeAsString() == message &&
                        has_known_fields(*oracle) &&
                        fits(oracle->action().arrays(), spec().action.flatten());
  const std::vector<Array> action = exact(spec().action.flatten());
  uint64_t number = 0;
  try {
    grpc::ByteBuffer buffer = buffer_of(message, chunk);
    number = decode_action(&buffer, action);
  } catch (const WireError&) {
    CHECK(!must_fit);
    throw;
  }
  wire::AgentMessage equal;
  equal.mutable_action()->set_arrays(content(action));
  equal.mutable_action()->set_number(number);
  CHECK(bytes_of(encode_action(action, number, pool())) == equal.SerializeAsString());
  CHECK(!oracle || oracle->action().arrays() == equal.action().arrays());
}

void check_env_hello(const std::string& message, size_t chunk) {
  grpc::ByteBuffer buffer = buffer_of(message, chunk);
  const wire::EnvMessage decoded = decode_env_message(&buffer);
  if (!decoded.has_hello()) return;
  check_limits(StreamSpec(decoded.hello()));
  CHECK(decoded.hello().stream_id().size() <= kMaxStreamIdBytes);
  grpc::ByteBuffer again = encode(decoded);
  CHECK(decode_env_message(&again).SerializeAsString() == decoded.SerializeAsString());
}

void check_agent_hello(const std::string& message, size_t chunk) {
  grpc::ByteBuffer buffer = buffer_of(message, chunk);
  const wire::AgentMessage decoded = decode_agent_message(&buffer);
  grpc::ByteBuffer again = encode(decoded);
  CHECK(decode_agent_message(&again).SerializeAsString() ==
        decoded.SerializeAsString());
}

}  // namespace
}  // namespace torchbeast

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torchbeast;
  // Protobuf would write a line for each text that is not UTF-8.
  [[maybe_unused]] static const auto silent = google::protobuf::SetLogHandler(nullptr);
  if (size < 2) return 0;
  const size_t chunk = data[1] == 0 ? 1 << 20 : data[1];
  const std::string message(reinterpret_cast<const char*>(data + 2), size - 2);
  constexpr decltype(&check_step) kChecks[] = {check_env_hello, check_agent_hello,
                                               check_step, check_action};
  try {
    kChecks[data[0] % kKinds](message, chunk);
  } catch (const WireError& error) {
    // Texts end up in logs and in the status of a call.
    CHECK(std::strlen(error.what()) < 4096);
  }
  return 0;
}
