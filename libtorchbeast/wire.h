// Messages of proto/torchbeast.proto: rules, and a codec that copies arrays once.
//
// Handshakes and errors are ordinary protobuf messages. Steps and actions, which carry
// the bytes, are read with protobuf's CodedInputStream straight from the transport's
// memory into their destination, and written straight into the transport's memory.
//
// Whatever a peer sends ends in a result or in a WireError: every length is checked
// against the bytes that are there before it is used.

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
constexpr int kMaxDepth = 16;         // levels of Space
constexpr int64_t kMaxArrays = 1024;  // of a step
// Dimensions of one environment's array; a rollout puts [T, E] in front.
constexpr size_t kMaxSpaceDims = Shape::kMaxDims - 2;
constexpr int64_t kMaxEnvs = 16384;
constexpr int64_t kMaxElements = 1 << 20;       // of one environment's observation
constexpr int64_t kMaxChoices = 1 << 18;        // of an observation: all n together
constexpr int64_t kMaxActionNumbers = 1 << 16;  // of an action: all n and elements
constexpr double kMaxMagnitude = 1e9;           // of observations and rewards
constexpr int64_t kMaxStep = int64_t{1} << 53;  // of an episode or a game
constexpr int64_t kMaxMessageBytes = 256 << 20;
constexpr int64_t kMaxHelloBytes = 4 << 20;
constexpr int64_t kMaxErrorBytes = 1 << 20;
constexpr size_t kMaxNameBytes = 1024;
constexpr int kMaxSettings = 1024;
constexpr size_t kMaxStreamIdBytes = 64;

// Where they stand among a step's arrays, behind the observation's.
enum StandardField : size_t {
  kRewardField = 0,
  kDoneField = 1,
  kEpisodeStepField = 2,
  kEpisodeReturnField = 3,
  kStandardFields = 4,
};

// A message that breaks the rules; the text says which.
class WireError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// --- Handshake ---------------------------------------------------------------------

// What the numbers of an array [E, ...] may be.
struct ValueRule {
  enum Kind {
    kAny,
    kMagnitude,  // at most `magnitude`, and finite
    kRange,      // int64: from low to high
    kBinary,     // int8: 0 or 1
  } kind = kAny;
  double magnitude = 0;
  std::vector<int64_t> low, high;  // one each, or one per number of an environment
};

// What a stream's steps look like, made from the environment's hello.
struct StreamSpec {
  std::string environment;
  int64_t num_envs = 0;
  SpecNest observation;            // [E, ...]
  std::vector<ArraySpec> arrays;   // of a step, in the wire's order, each [E, ...]
  std::vector<std::string> names;  // of the arrays, for messages
  std::vector<ValueRule> rules;    // of the arrays
  size_t num_observation_arrays = 0;
  std::vector<std::string> extra_fields;  // their names, in the order of the arrays
  bool has_action = false;                // else any actions are taken
  SpecNest action;                        // [E, ...]

  // Throws WireError if the hello breaks a rule or exceeds a limit.
  explicit StreamSpec(const wire::EnvHello& hello);
  StreamSpec() = default;
};

// Of what a space is, which decides how large it may be.
enum class SpaceOf { kObservation, kAction };
// The arrays of `num_envs` values of a space: Discrete -> int64 [E]. Throws WireError,
// naming the place, on a space that breaks a rule. With `names` and `rules`, these are
// appended to, in the order of the arrays.
SpecNest space_spec(const wire::Space& space, int64_t num_envs,
                    const std::string& place, SpaceOf what,
                    std::vector<std::string>* names = nullptr,
                    std::vector<ValueRule>* rules = nullptr);

// Throws WireError, naming the array, the environment and the value, if a step's arrays
// (or the first of them) hold numbers that their rules don't allow.
void check_values(const StreamSpec& spec, const std::vector<Array>& arrays);

// --- Steps and actions -------------------------------------------------------------

// Called with the dtype and shape of array number i before its bytes are read; returns
// where to put them: an array of just that dtype and shape. Throws WireError to refuse.
// The message is known to hold all bytes of the array. An empty function refuses all.
using Destination = std::function<Array(size_t i, const ArraySpec& spec)>;

// A Destination that accepts just what `expected` lists, into arrays[i].
// The vectors must outlive it.
Destination expect(const std::vector<ArraySpec>& expected,
                   const std::vector<Array>& arrays, const char* what);
// A Destination for arrays that nobody announced, into new memory of `pool`, appended
// to *arrays; each must have `num_envs` as its first dimension.
Destination accept_any(int64_t num_envs, MemoryPool& pool, std::vector<Array>* arrays);

struct Decoded {
  enum Kind { kHello, kStep, kAction, kError } kind = kHello;
  wire::EnvHello env_hello;      // kHello from an environment
  wire::AgentHello agent_hello;  // kHello from the learner
  std::string error;             // kError
  size_t num_arrays = 0;         // kStep, kAction: how many came
  size_t num_final_arrays = 0;
  uint64_t env_nanoseconds = 0;  // kStep
};

// Decode one EnvMessage or AgentMessage, the next `num_bytes` of `in`. Checks every
// length against what is there, and every array against its destination, before bytes
// are read; a hello is only parsed, see StreamSpec. Throws WireError; then destinations
// may hold anything. Whether enough arrays came is the caller's to check.
Decoded decode_env_message(google::protobuf::io::ZeroCopyInputStream* in,
                           int64_t num_bytes, const Destination& arrays,
                           const Destination& final_observation);
Decoded decode_agent_message(google::protobuf::io::ZeroCopyInputStream* in,
                             int64_t num_bytes, const Destination& arrays);
// The same from what the transport delivers.
Decoded decode_env_message(grpc::ByteBuffer* message, const Destination& arrays,
                           const Destination& final_observation);
Decoded decode_agent_message(grpc::ByteBuffer* message, const Destination& arrays);

// Encode; each array is copied once, into one block of `pool`, which the transport
// gives back when it has sent it, maybe from a thread of its own. Throw WireError if
// the message exceeds a limit, std::invalid_argument on an array without memory.
grpc::ByteBuffer encode_step(const std::vector<Array>& arrays,
                             const std::vector<Array>& final_observation,
                             MemoryPool& pool, uint64_t env_nanoseconds = 0);
grpc::ByteBuffer encode_action(const std::vector<Array>& arrays, MemoryPool& pool);
// An EnvMessage.error. The text may be any bytes: what is not UTF-8 is replaced, and
// from the middle of a long one some is left out.
grpc::ByteBuffer encode_error(const std::string& text);
// Handshakes. That a hello keeps the rules is StreamSpec's to check.
grpc::ByteBuffer encode(const wire::EnvMessage& message);
grpc::ByteBuffer encode(const wire::AgentMessage& message);

}  // namespace torchbeast
