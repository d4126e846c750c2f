// Environments as servers and clients step them.

#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "array.h"
#include "end.h"
#include "stream_spec.h"
#include "sync.h"

namespace torchbeast {

// E environments behind one stream. One thread at a time.
//
// Any method may throw any std::exception: that ends the stream, and its text travels
// to the learner.
class Environment {
 public:
  virtual ~Environment() = default;
  // Which games it plays; called before the first reset() or not at all.
  virtual void seed(const wire::Seeding&) {}
  // Starts new episodes. The row's arrays are as hello() describes them, in each row.
  // Its memory is the environment's: the contents are valid until the next reset() or
  // step(), or the environment's end.
  virtual EnvRow reset() = 0;
  // Describes the rows. REQUIRES: reset() has returned.
  virtual const wire::EnvHello& hello() const = 0;
  // Makes a step with the action's arrays [E, ...], as the hello's action space says,
  // which are valid until it returns. The row is as reset() says.
  virtual EnvRow step(const std::vector<Array>& action) = 0;
};

// It can't be served, now or later: its spaces or methods are not as they must be.
class UnusableEnvironment : public Ended {
 public:
  explicit UnusableEnvironment(const std::string& why)
      : Ended(End::kUnusable, "this environment can't be served: " + why) {}
};

// Makes the environment of a new stream. Its exceptions, and those of the environment,
// travel to the learner as text.
using EnvironmentFactory = std::function<std::unique_ptr<Environment>()>;

// The method that an environment is in, such as "step()"; null: none. Other threads
// read it to name environments that hang.
using Activity = std::atomic<const char*>;

// How long stop() waits for environments.
constexpr Milliseconds kStopLimit{5'000};

}  // namespace torchbeast
