// How streams end.
//
// What ends a stream is thrown in the thread that works on it: an Ended, or an error of
// this side. end_of() makes an End of it, once, where that thread is done with the
// stream. Whoever acts on it switches over its kind, and to_status() tells the other
// side.

#pragma once

#include <grpcpp/support/status.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace torchbeast {

struct End {
  enum Kind {
    kLeft,      // the other side has ended it without an error
    kLost,      // no connection, or none any more
    kOver,      // the learner is about to end
    kFinished,  // its run is complete: no other comes
    kRaised,    // the other side's environment has raised, and it knows
    kFailed,    // an error of this side, or of its environment
    // Refusals:
    kRefused,     // one side says no for good: another version, another user, ...
    kStranger,    // the other side has not shown the token
    kBrokeRules,  // the other side, those of torchbeast.proto
    kUnusable,    // this side's environment can't be served, now or later
    kBusy,        // this side can't take the other now
    kNoMemory,    // nor has it the memory
  };
  bool is_refusal() const { return kind >= kRefused; }
  // This side's own error. On the environment's side: its environment has raised.
  bool is_own() const { return kind == kFailed || kind == kNoMemory; }

  Kind kind = kLeft;
  std::string text{};
  std::exception_ptr error{};  // what was thrown; null: nothing was
};

// What ends a stream other than an error of this side.
class Ended : public std::runtime_error {
 public:
  Ended(End::Kind kind, const std::string& text)
      : std::runtime_error(text), kind(kind) {}
  const End::Kind kind;
};

// Why a learner whose run is complete cancels the streams that have joined.
extern const char kRunIsComplete[];

// Throws kOver.
[[noreturn]] void throw_over();

End end_of(const std::exception_ptr& error);

// Runs f() and says how that ends: as f() says if it returns an End, else kLeft.
template <typename F, typename = std::enable_if_t<std::is_invocable_v<F>>>
End end_of(F&& f) {
  try {
    if constexpr (std::is_same_v<decltype(f()), End>) {
      return f();
    } else {
      f();
      return {};
    }
  } catch (...) {
    return end_of(std::current_exception());
  }
}

// The status with which a server ends a stream, and what such a status means to the
// side that has dialled.
grpc::Status to_status(const End& end);
End::Kind meaning_of(grpc::StatusCode code);

}  // namespace torchbeast
