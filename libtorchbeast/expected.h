// What a run's environments must be: as the learner's flags say, and alike.

#pragma once

#include <atomic>
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
  // How this one differs from the first. Takes long if it is large.
  std::string difference(const KnownHello& first) const;

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

  // Throws a refusal, which says what differs. It is for good, but one that has joined
  // and differs from the first may try again until settle(). `peer` goes into messages.
  void check(const wire::EnvHello& hello, const std::string& peer,
             bool has_joined = false) TB_EXCLUDES(mutex_);
  // The run has learned from such environments: there is no other first any more.
  void settle() { is_settled_ = true; }
  // How many were told to try again.
  uint64_t num_different() const { return num_different_; }

 private:
  const ExpectedEnvironment expected_;
  std::atomic<bool> is_settled_{false};
  std::atomic<uint64_t> num_different_{0};
  Mutex mutex_;
  std::shared_ptr<const KnownHello> first_ TB_GUARDED_BY(mutex_);
};

}  // namespace torchbeast
