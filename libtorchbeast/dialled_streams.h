// Streams to environment servers that the pool dials. Only the pool's own .cc files
// include this.

#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include "pool_streams.h"
#include "thread.h"

namespace torchbeast {

// The streams of one server, one after the other. A thread dials, and works on a stream
// that goes through gRPC alone; one that goes through shared memory needs none until
// the collector gives it back. Of run()'s thread.
class DialledStreams {
 public:
  // Of the address with this index.
  DialledStreams(PoolStreams* shared, size_t index)
      : shared_(*shared), index_(index), address_(shared->options.addresses[index]) {}
  // Waits for the thread and the collector, which may still report an error of this
  // side. REQUIRES: the pool is closing.
  ~DialledStreams();
  DialledStreams(const DialledStreams&) = delete;

  // If there is something to do, begins to do it in a thread. Throws std::runtime_error
  // if the system refuses the first thread. The next ones are asked for in the next
  // call, and meanwhile the stream counts as gone.
  void attend();

 private:
  struct Stream {
    Stream(PoolStreams* shared, const Address& address);

    DialledConnection connection;
    PoolStreams::Presence presence;
    std::optional<EnvSession> session;
    std::optional<Unroll> unroll;
  };
  enum Place {
    kIdle,  // nobody works on it
    kHere,  // the thread does
    kAway,  // the collector has the stream
  };

  // The thread. `back`: the stream has come back, with this error.
  void run(std::optional<std::exception_ptr> back);
  // From dialling until it has its first action.
  void open();
  // Takes the next step and its action; throws why there is no step.
  void receive_and_act();
  // Gives it to the collector, and touches nothing of this afterwards.
  void hand_over();
  void close(const End& end);
  void act_on(const End& end);
  void set_final(bool is_final);
  void on_step(bool finished);

  PoolStreams& shared_;
  const size_t index_;
  const Address address_;

  Place place_ TB_GUARDED_BY(shared_.mutex) = kIdle;
  // What the collector has given back.
  std::optional<std::exception_ptr> back_ TB_GUARDED_BY(shared_.mutex);
  bool has_begun_ = false;
  Thread thread_;

  // Of who works on it.
  std::optional<Stream> stream_;
  std::optional<wire::Seeding> seeding_;  // of the next stream
  bool answered_before_ = false;
  const Clock::time_point began_ = Clock::now();
  bool connected_before_ = false;
  bool is_trusted_ = true;
  bool is_final_ = false;
  std::string last_text_;
  Backoff backoff_;
  // Of the last connection.
  bool was_connected_ = false;
  bool was_cancelled_ = false;  // because it hung
  bool was_refused_ = false;
  int64_t num_dropped_ = 0;
};

}  // namespace torchbeast
