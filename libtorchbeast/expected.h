// What a run's environments must be, as the learner's flags say.

#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "torchbeast.pb.h"

namespace torchbeast {

struct ExpectedEnvironment {
  std::string name;      // empty: any
  int64_t num_envs = 0;  // E; 0: any
  // Those of the hello, all of them; empty: any.
  std::map<std::string, std::string> settings;

  // Throws RefusedError, which names `peer` and all differences, as flags with both
  // values. A name or settings that the hello leaves out may be anything.
  void check(const wire::EnvHello& hello, const std::string& peer) const;
};

}  // namespace torchbeast
