// Environments as servers and clients step them.

#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "array.h"
#include "wire.h"

namespace torchbeast {

// E environments behind one stream. Used by one thread at a time.
class Environment {
 public:
  // What a step says; the arrays' memory is valid until the next call.
  struct Row {
    std::vector<Array> arrays;             // as StreamSpec::arrays
    std::vector<Array> final_observation;  // empty, or as the observation's arrays
  };

  virtual ~Environment() = default;
  // Which games it plays; called before the first reset() or not at all.
  virtual void seed(const wire::Seeding&) {}
  // Starts new episodes; the hello describes the row, and is valid from here on.
  virtual Row reset() = 0;
  virtual const wire::EnvHello& hello() const = 0;
  // Arrays [E, ...] of the action, which the hello's action space describes.
  virtual Row step(const std::vector<Array>& action) = 0;
};

// Makes the environment of a new stream. Its exceptions, and those of the environment,
// travel to the learner as text.
using EnvironmentFactory = std::function<std::unique_ptr<Environment>()>;

}  // namespace torchbeast
