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

// A hello and who has said it, made ready to be compared.
class KnownHello {
 public:
  // Takes long if the hello is large. `peer` goes into messages.
  KnownHello(wire::EnvHello hello, std::string peer);

  const wire::EnvHello& hello() const { return hello_; }
  const std::string& peer() const { return peer_; }
  // Whether they are of one kind: equal but for what is the environment's own. The name
  // may be left out. Compares bytes.
  bool is_alike(const KnownHello& other) const;
  // Throws RefusedError, which says how this one differs from the first. Takes long if
  // it is large.
  [[noreturn]] void refuse(const KnownHello& first) const;

 private:
  bool have_names(const KnownHello& other) const;

  const wire::EnvHello hello_;
  const std::string peer_;
  const std::string common_;  // the bytes of what is not the environment's own
};

// All environments of a run are as expected, and alike: they have the spaces and fields
// of the first. Thread-safe.
class HelloCheck {
 public:
  explicit HelloCheck(ExpectedEnvironment expected) : expected_(std::move(expected)) {}

  // Throws RefusedError, which says what differs. `peer` goes into messages.
  void check(const wire::EnvHello& hello, const std::string& peer) TB_EXCLUDES(mutex_);
  // Whether the spaces and fields are those of the first.
  bool is_alike(const KnownHello& hello) TB_EXCLUDES(mutex_);

 private:
  // The first, which `own` becomes if there is none.
  std::shared_ptr<const KnownHello> first_or(
      const std::shared_ptr<const KnownHello>& own) TB_EXCLUDES(mutex_);

  const ExpectedEnvironment expected_;
  Mutex mutex_;
  std::shared_ptr<const KnownHello> first_ TB_GUARDED_BY(mutex_);
};

}  // namespace torchbeast
