// Streams to environment servers that the pool dials. Only the pool's own .cc files
// include this.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "pool_streams.h"
#include "thread.h"

namespace torchbeast {

// The streams of one server, one after the other, in a thread of their own.
class DialledStreams {
 public:
  // Dials the address with this index. Throws std::runtime_error if the system refuses
  // the thread.
  DialledStreams(PoolStreams* shared, size_t index);
  // Waits for the thread. REQUIRES: the pool is closing.
  ~DialledStreams() = default;
  DialledStreams(const DialledStreams&) = delete;

 private:
  void run();
  // One stream, from dialling to its end.
  End run_stream();
  void unroll(DialledConnection& connection, PoolStreams::Presence& presence,
              std::optional<Unroll>* unroll);
  void act_on(const End& end);
  void set_final(bool is_final);

  PoolStreams& shared_;
  const size_t index_;
  const Address address_;

  // Of the thread.
  std::optional<wire::Seeding> seeding_;  // of the next stream
  bool answered_before_ = false;
  const Clock::time_point began_ = Clock::now();
  bool connected_before_ = false;
  bool is_final_ = false;
  std::string last_text_;
  Backoff backoff_;
  // Of the last connection.
  bool was_connected_ = false;
  bool was_cancelled_ = false;  // because it hung
  bool was_refused_ = false;
  int64_t num_dropped_ = 0;

  Thread thread_;  // the first to end
};

}  // namespace torchbeast
