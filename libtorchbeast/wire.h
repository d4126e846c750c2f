// Messages of proto/torchbeast.proto: rules, and a codec that copies arrays once.
//
// Handshakes and errors are ordinary protobuf messages. Steps and actions, which carry
// the bytes, are read with protobuf's CodedInputStream straight from the transport's
// memory into their destination, and written straight into the transport's memory.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "array.h"
#include "torchbeast.pb.h"

namespace google::protobuf::io {
class ZeroCopyInputStream;
}

namespace torchbeast {

constexpr uint32_t kWireVersion = 1;
constexpr int kMaxDepth = 16;
constexpr int64_t kMaxArrays = 1024;
constexpr int64_t kMaxEnvs = 65536;
constexpr int64_t kMaxMessageBytes = 256 << 20;
constexpr size_t kMaxNameBytes = 1024;

// A message that breaks the rules; the text says which.
class WireError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// --- Handshake
// ------------------------------------------------------------------------

// What a stream's steps look like, made from the environment's hello.
struct StreamSpec {
  std::string environment;
  int64_t num_envs = 0;
  SpecNest observation;           // [E, ...]
  std::vector<ArraySpec> arrays;  // of a step, in the wire's order, each [E, ...]
  size_t num_observation_arrays = 0;
  std::vector<std::string> extra_fields;  // their names, in the order of the arrays
  bool has_action = false;                // else any actions are taken
  SpecNest action;                        // [E, ...]

  // Throws WireError if the hello breaks a rule or exceeds a limit.
  explicit StreamSpec(const wire::EnvHello& hello);
  StreamSpec() = default;
};

// The arrays of `num_envs` values of a space: Discrete -> int64 [E]. Throws WireError,
// naming the place, on a space that breaks a rule.
SpecNest space_spec(const wire::Space& space, int64_t num_envs,
                    const std::string& place);

// --- Steps and actions
// ----------------------------------------------------------------

// Called with the dtype and shape of array number i before its bytes are read; returns
// where to put them: an array of just that dtype and shape. Throws WireError to refuse.
using Destination = std::function<Array(size_t i, const ArraySpec& spec)>;

// A Destination that accepts just what `expected` lists, into arrays[i].
// The vectors must outlive it.
Destination expect(const std::vector<ArraySpec>& expected,
                   const std::vector<Array>& arrays, const char* what);
// A Destination for arrays that nobody announced, into new memory of `pool`, appended
// to *arrays; each must have `num_envs` as its first dimension.
Destination accept_any(int64_t num_envs, MemoryPool& pool, std::vector<Array>* arrays);

struct Decoded {
  enum Kind { kHello, kStep, kAction, kError } kind;
  wire::EnvHello env_hello;      // kHello from an environment
  wire::AgentHello agent_hello;  // kHello from the learner
  std::string error;             // kError
  size_t num_arrays = 0;         // kStep, kAction: how many came
  size_t num_final_arrays = 0;
};

// Decode one EnvMessage or AgentMessage. Checks every length against what is there, and
// every array against its destination, before bytes are read. Throws WireError; then
// destinations may hold anything. Whether enough arrays came is the caller's to check.
Decoded decode_env_message(google::protobuf::io::ZeroCopyInputStream* in,
                           int64_t num_bytes, const Destination& arrays,
                           const Destination& final_observation);
Decoded decode_agent_message(google::protobuf::io::ZeroCopyInputStream* in,
                             int64_t num_bytes, const Destination& arrays);
// The same from what the transport delivers.
Decoded decode_env_message(grpc::ByteBuffer* message, const Destination& arrays,
                           const Destination& final_observation);
Decoded decode_agent_message(grpc::ByteBuffer* message, const Destination& arrays);

// Encode; each array is copied once, into memory of `pool`.
grpc::ByteBuffer encode_step(const std::vector<Array>& arrays,
                             const std::vector<Array>& final_observation,
                             MemoryPool& pool);
grpc::ByteBuffer encode_action(const std::vector<Array>& arrays, MemoryPool& pool);
grpc::ByteBuffer encode(const wire::EnvMessage& message);
grpc::ByteBuffer encode(const wire::AgentMessage& message);

}  // namespace torchbeast
