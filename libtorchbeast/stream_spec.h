// What a stream's messages look like, as its environment's hello announces it.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "end.h"
#include "text.h"
#include "torchbeast.pb.h"

namespace torchbeast {

// The limits of proto/torchbeast.proto.
constexpr uint32_t kWireVersion = 3;
constexpr int kMaxDepth = 16;         // levels of Space
constexpr int64_t kMaxArrays = 1024;  // of a step
// Dimensions of one environment's array; a rollout puts [T, E] in front.
constexpr size_t kMaxSpaceDims = Shape::kMaxDims - 2;
constexpr int64_t kMaxEnvs = 16384;
constexpr int64_t kMaxElements = 1 << 20;       // of one environment's observation
constexpr int64_t kMaxChoices = 1 << 18;        // of an observation: sum of all n
constexpr int64_t kMaxActionNumbers = 1 << 16;  // of an action: elements, sum of all n
constexpr int64_t kMaxStep = int64_t{1} << 53;  // of an episode or a game
constexpr int64_t kMaxMessageBytes = 256 << 20;
constexpr int64_t kMaxHelloBytes = 256 << 10;  // also of an error
constexpr int64_t kMaxLayoutBytes = 4 << 20;   // of an action with its layout
constexpr size_t kMaxNameBytes = 1024;
constexpr int kMaxSettings = 1024;
constexpr size_t kMaxStreamIdBytes = 64;

// The arrays of a step that follow the observation's: reward, done, episode_step,
// episode_return.
constexpr size_t kDoneField = 1, kStandardFields = 4;

// A message that breaks the rules; the text says which rule.
class WireError : public Ended {
 public:
  explicit WireError(const std::string& message)
      : Ended(End::kBrokeRules, printable(message)) {}
};

[[noreturn]] void refuse(const std::string& place, const std::string& why);

// The values that an array's numbers may have: finite ones from low to high. There is
// one bound for all numbers or one per number of an environment; without bounds, any
// value is allowed.
struct ValueRule {
  std::vector<double> low, high;
};

// The arrays of a stream's steps and actions. A value; copies share nothing.
struct StreamSpec {
  int64_t num_envs = 0;
  SpecNest observation;            // [E, ...]
  std::vector<ArraySpec> arrays;   // of a step, in the wire's order, each [E, ...]
  std::vector<std::string> names;  // of the arrays; those behind the observation's
                                   // are the names of the fields
  std::vector<ValueRule> rules;    // of the arrays
  size_t num_observation_arrays = 0;
  std::optional<size_t> truncated, game_over;    // the fields of these names, if any
  size_t step_bytes = 0, observation_bytes = 0;  // of all arrays; of the first
  bool has_action_space = false;  // else actions are arrays of any kind, and say which
  SpecNest action;                // [E, ...], with an action space
  size_t action_bytes = 0;

  // Throws WireError if the hello breaks a rule or exceeds a limit.
  explicit StreamSpec(const wire::EnvHello& hello);
  StreamSpec() = default;
};

// One step of a stream's environments, arrays [E, ...].
struct EnvRow {
  std::vector<Array> arrays;             // as StreamSpec::arrays
  std::vector<Array> final_observation;  // empty, or as the observation's arrays
  uint64_t env_nanoseconds = 0;
  uint64_t action_number = 0;  // of the action that has led here
};

// The array that an action's layout announces, [num_envs, ...]. Throws WireError.
ArraySpec layout_spec(const wire::Field& layout, int64_t num_envs);

// Whether the field "truncated" is there and true for any environment.
bool any_truncated(const StreamSpec& spec, const std::vector<Array>& arrays);
// Whether these arrays of a step are the first rows of new episodes for all E.
bool is_between_episodes(const StreamSpec& spec, const std::vector<Array>& arrays);

// Throws WireError, naming the array, the environment and the value, if a number of a
// step's arrays (or of its first arrays only) breaks its rule. BOOLs are not checked.
void check_values(const StreamSpec& spec, const std::vector<Array>& arrays);

}  // namespace torchbeast
