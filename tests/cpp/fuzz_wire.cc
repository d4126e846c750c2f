// libFuzzer target of the wire codec: whatever comes is refused with a WireError, or is
// what protobuf reads in it, too.
//
// The first byte of the input chooses the message and the destinations (see Mode), the
// second the size of the chunks that the rest, the message, is delivered in.
//
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined ... fuzz_wire.cc
//   ./fuzz_wire tests/cpp/corpus

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/logging.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "wire.h"

namespace torchbeast {
namespace {

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

enum Mode : uint8_t {
  kAgent = 1,      // an AgentMessage, else an EnvMessage
  kExpect = 2,     // only the arrays of expected_specs() are taken, else any
  kAcceptAny = 4,  // into a Destination of accept_any (of an AgentMessage)
};

MemoryPool& pool() {
  static MemoryPool pool;
  return pool;
}

const std::vector<ArraySpec>& expected_specs() {
  static const std::vector<ArraySpec> specs = {{DType::kUint8, {2, 3}},
                                               {DType::kFloat32, {2}},
                                               {DType::kBool, {2}},
                                               {DType::kInt64, {2}},
                                               {DType::kFloat32, {2, 0}}};
  return specs;
}

// Memory of its exact size, so that AddressSanitizer sees a byte too many. (Blocks of a
// pool are larger than their arrays.)
Array exact(const ArraySpec& spec) {
  const auto data = std::make_shared<std::vector<uint8_t>>(spec.num_bytes());
  return Array(spec, data->data(), data);
}

struct Arrays {
  std::vector<Array> arrays;
  Destination destination;

  explicit Arrays(uint8_t mode) {
    if ((mode & kExpect) != 0) {
      for (const ArraySpec& spec : expected_specs()) arrays.push_back(exact(spec));
      destination = expect(expected_specs(), arrays, "step");
    } else if ((mode & kAcceptAny) != 0) {
      destination = accept_any(2, pool(), &arrays);
    } else {
      destination = [this](size_t i, const ArraySpec& spec) {
        CHECK(i == arrays.size());
        arrays.push_back(exact(spec));
        return arrays.back();
      };
    }
  }
};

struct Result {
  Decoded decoded;
  std::vector<Array> arrays;
  std::vector<Array> final_observation;
};

Result decode(const std::string& message, int chunk, uint8_t mode) {
  google::protobuf::io::ArrayInputStream in(message.data(),
                                            static_cast<int>(message.size()), chunk);
  const auto size = static_cast<int64_t>(message.size());
  Arrays arrays(mode);
  Arrays final_observation(mode);
  Result result;
  if ((mode & kAgent) != 0) {
    result.decoded = decode_agent_message(&in, size, arrays.destination);
  } else {
    result.decoded = decode_env_message(&in, size, arrays.destination,
                                        final_observation.destination);
  }
  const auto used = [](const std::vector<Array>& arrays, size_t count) {
    CHECK(count <= arrays.size());
    return std::vector<Array>(arrays.begin(),
                              arrays.begin() + static_cast<ptrdiff_t>(count));
  };
  result.arrays = used(arrays.arrays, result.decoded.num_arrays);
  result.final_observation =
      used(final_observation.arrays, result.decoded.num_final_arrays);
  return result;
}

void check_equal(const std::vector<Array>& a, const std::vector<Array>& b) {
  CHECK(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].spec() == b[i].spec());
    const size_t size = a[i].num_bytes();
    CHECK(size == 0 || std::memcmp(a[i].data(), b[i].data(), size) == 0);
  }
}

void check_as_protobuf(const std::vector<Array>& arrays,
                       const google::protobuf::RepeatedPtrField<wire::Array>& oracle) {
  CHECK(arrays.size() == static_cast<size_t>(oracle.size()));
  for (size_t i = 0; i < arrays.size(); ++i) {
    const wire::Array& other = oracle[static_cast<int>(i)];
    CHECK(static_cast<int>(arrays[i].dtype()) == static_cast<int>(other.dtype()));
    CHECK(arrays[i].shape().size() == static_cast<size_t>(other.shape_size()));
    for (size_t d = 0; d < arrays[i].shape().size(); ++d) {
      CHECK(static_cast<uint64_t>(arrays[i].shape()[d]) ==
            other.shape(static_cast<int>(d)));
    }
    const size_t size = arrays[i].num_bytes();
    CHECK(size == other.data().size());
    CHECK(size == 0 || std::memcmp(arrays[i].data(), other.data().data(), size) == 0);
  }
}

std::string bytes_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  CHECK(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

void check_limits(const StreamSpec& spec) {
  CHECK(spec.num_envs >= 1 && spec.num_envs <= kMaxEnvs);
  CHECK(spec.num_observation_arrays >= 1);
  CHECK(spec.num_observation_arrays == spec.observation.num_leaves());
  CHECK(spec.arrays.size() ==
        spec.num_observation_arrays + 4 + spec.extra_fields.size());
  CHECK(spec.arrays.size() <= static_cast<size_t>(kMaxArrays));
  size_t bytes = 0;
  for (const ArraySpec& array : spec.arrays) {
    CHECK(array.shape.size() >= 1 && array.shape.size() <= kMaxSpaceDims + 1);
    CHECK(array.shape[0] == spec.num_envs);
    bytes += array.num_bytes();
  }
  CHECK(bytes <= static_cast<size_t>(kMaxMessageBytes));
  CHECK(!spec.has_action || !spec.action.empty());
}

void check_env(const std::string& message, const Result& result) {
  wire::EnvMessage oracle;
  CHECK(oracle.ParseFromString(message));
  std::string again;
  switch (result.decoded.kind) {
    case Decoded::kHello:
      CHECK(oracle.has_hello());
      CHECK(result.decoded.env_hello.SerializeAsString() ==
            oracle.hello().SerializeAsString());
      check_limits(StreamSpec(oracle.hello()));
      CHECK(oracle.hello().stream_id().size() <= kMaxStreamIdBytes);
      return;
    case Decoded::kStep:
      CHECK(oracle.has_step());
      check_as_protobuf(result.arrays, oracle.step().arrays());
      check_as_protobuf(result.final_observation, oracle.step().final_observation());
      CHECK(result.decoded.env_nanoseconds == oracle.step().env_nanoseconds());
      again = bytes_of(encode_step(result.arrays, result.final_observation, pool(),
                                   result.decoded.env_nanoseconds));
      break;
    case Decoded::kError:
      CHECK(oracle.has_error());
      CHECK(result.decoded.error == oracle.error().message());
      again = bytes_of(encode_error(result.decoded.error));
      break;
    case Decoded::kAction:
      CHECK(false);
  }
  const Result second = decode(again, 1 << 20, 0);
  CHECK(second.decoded.kind == result.decoded.kind);
  check_equal(second.arrays, result.arrays);
  check_equal(second.final_observation, result.final_observation);
  CHECK(second.decoded.env_nanoseconds == result.decoded.env_nanoseconds);
  // Texts are cut where they are long.
  CHECK(second.decoded.error == result.decoded.error || again.size() > 60000);
}

void check_agent(const std::string& message, const Result& result) {
  wire::AgentMessage oracle;
  CHECK(oracle.ParseFromString(message));
  if (result.decoded.kind == Decoded::kHello) {
    CHECK(oracle.has_hello());
    CHECK(result.decoded.agent_hello.version() == oracle.hello().version());
    return;
  }
  CHECK(result.decoded.kind == Decoded::kAction && oracle.has_action());
  check_as_protobuf(result.arrays, oracle.action().arrays());
  const std::string again = bytes_of(encode_action(result.arrays, pool()));
  check_equal(decode(again, 1 << 20, kAgent).arrays, result.arrays);
}

}  // namespace
}  // namespace torchbeast

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace torchbeast;
  // Protobuf would write a line for each text that is not UTF-8.
  [[maybe_unused]] static const auto silent = google::protobuf::SetLogHandler(nullptr);
  if (size < 2) return 0;
  const uint8_t mode = data[0];
  const int chunk = data[1] == 0 ? 1 << 20 : data[1];
  const std::string message(reinterpret_cast<const char*>(data + 2), size - 2);
  try {
    const Result result = decode(message, chunk, mode);
    (mode & kAgent) != 0 ? check_agent(message, result) : check_env(message, result);
  } catch (const WireError& error) {
    // Texts end up in logs and in the status of a call.
    CHECK(std::strlen(error.what()) < 4096);
  }
  return 0;
}
