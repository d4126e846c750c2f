// What a run's environments must be: as the learner's flags say, and alike.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "sync.h"
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

// --- Hellos of one run

// Whether they are of one kind: equal but for what is the environment's own. The name
// may be left out.
bool are_alike(const wire::EnvHello& first, const wire::EnvHello& hello);
// Throws RefusedError, which says how `hello` differs from the first. Takes long if
// much does.
[[noreturn]] void refuse_other(const wire::EnvHello& first,
                               const std::string& first_peer,
                               const wire::EnvHello& hello, const std::string& peer);

// All environments of a run are as expected, and alike: they have the spaces and fields
// of the first. Thread-safe.
class HelloCheck {
 public:
  explicit HelloCheck(ExpectedEnvironment expected) : expected_(std::move(expected)) {}

  // Throws RefusedError, which says what differs. `peer` goes into messages.
  void check(const wire::EnvHello& hello, const std::string& peer) TB_EXCLUDES(mutex_);
  // Whether the spaces and fields are those of the first.
  bool is_alike(const wire::EnvHello& hello) TB_EXCLUDES(mutex_);

 private:
  struct First {
    wire::EnvHello hello;
    std::string peer;
  };
  // The first, which `own` becomes if there is none. Large hellos are compared with no
  // lock held.
  std::shared_ptr<const First> first_or(const std::shared_ptr<const First>& own)
      TB_EXCLUDES(mutex_);

  const ExpectedEnvironment expected_;
  Mutex mutex_;
  std::shared_ptr<const First> first_ TB_GUARDED_BY(mutex_);
};

}  // namespace torchbeast
