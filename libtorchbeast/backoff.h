// When to dial again.

#pragma once

#include <algorithm>

#include "sync.h"

namespace torchbeast {

// The time to wait before a peer is dialled again: 0.1 s at first, then twice as long
// each time, up to 1 s, or 10 s if the peer refuses. One thread at a time.
class Backoff {
 public:
  // `refused`: whether the peer was there and said no.
  Milliseconds next(bool refused = false) {
    wait_ = std::min(2 * wait_, Milliseconds(refused ? 10'000 : 1'000));
    return wait_;
  }
  // The peer has done its work.
  void reset() { wait_ = kFirst / 2; }

 private:
  static constexpr Milliseconds kFirst{100};
  Milliseconds wait_ = kFirst / 2;
};

}  // namespace torchbeast
