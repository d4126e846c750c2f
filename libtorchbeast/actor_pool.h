// Runs environments against batched inference, and makes rollouts.
//
// Environments are dialled at their servers, or have joined at a Listener. One thread
// per stream runs its session (env_session.h). An observation is copied once here, from
// the message into its row; one row of every T is copied once more, into row 0 of the
// next rollout.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "batching.h"
#include "events.h"
#include "expected.h"
#include "listener.h"
#include "sync.h"
#include "torchbeast.pb.h"
#include "transport.h"

namespace torchbeast {

// The docstring of Python's ActorPool (python/bind_pool.cc) says more about them.
struct ActorPoolOptions {
  int64_t unroll_length = 0;              // T >= 1
  bool named_rows = false;                // rows are dicts
  uint64_t max_rollout_bytes = 1 << 30;   // of all streams' rollouts in progress
  std::vector<std::string> addresses;     // one stream each
  Security security;                      // for the addresses
  std::shared_ptr<Listener> listener;     // has been started; may be null
  Milliseconds step_timeout{60'000};      // then the stream counts as lost
  Milliseconds maximum_downtime{60'000};  // without any environment
  int64_t max_env_failures = 10;          // per minute
  std::optional<wire::EnvHello> hello;    // none: that of the first to connect
  bool is_provisional = false;            // the caller settles for the hello
  ExpectedEnvironment expected;           // others are refused
  std::optional<uint64_t> seed;           // none, or a listener: not for dialled ones
  uint64_t first_stream = 0;
  uint64_t stream_stride = 1;
};

// The docstring of Python's ActorPool.stats() says more about them.
struct ActorPoolStats {
  uint64_t num_steps = 0;  // E for each message after the first
  uint64_t num_rollouts = 0;
  uint64_t num_reconnects = 0;
  uint64_t num_dropped_steps =
      0;                       // not those that the end of the run leaves unfinished
  uint64_t num_connected = 0;  // now
  uint64_t num_refused = 0;    // dialled streams whose peers broke a rule or refused
  uint64_t num_env_failures = 0;
  uint64_t bytes_copied = 0;
  uint64_t pool_bytes = 0;  // memory held for rollouts and messages
  double env_seconds = 0;
  double env_wait_seconds = 0;
  double inference_wait_seconds = 0;
  double queue_wait_seconds = 0;
  std::string last_error;
};

struct PoolStreams;  // see pool_streams.h

// Thread-safe. Owns the threads of the streams that it dials; those of joined streams
// are the listener's.
class ActorPool {
 public:
  // `initial_agent_state`: nest of [layers, n, ...], n = 1 (the same for every
  // environment) or E. Throws std::invalid_argument, also on bad addresses, and if the
  // rollouts of all streams exceed max_rollout_bytes by options.hello.
  ActorPool(ActorPoolOptions options, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher,
            ArrayNest initial_agent_state);
  ~ActorPool();
  ActorPool(const ActorPool&) = delete;

  // Runs until close() is called or the queue or the batcher is closed. To be called
  // once. Whatever goes wrong with one peer costs its stream only. The docstring of
  // Python's ActorPool (python/bind_pool.cc) says what the batcher and the queue get
  // and what the agent answers. The batcher's inputs share memory with the rollout:
  // inference must not write into them. Throws the first error that ends the run, after
  // it has closed the queue and the batcher:
  //   std::invalid_argument  the agent's outputs or the state don't fit; says where
  //   TransportError         there was no stream at all for too long, or all servers
  //                          refuse for good
  //   EnvironmentError       environments raised too often; the last one's traceback
  //   AsyncError             inference failed
  void run(const Interrupt& interrupt = nullptr);

  // Ends run(). May be called from any thread, any number of times.
  void close();

  uint64_t count() const;  // num_steps
  ActorPoolStats stats() const;
  // What has happened to streams, but for the refusals that the listener has noted.
  EventLog& events();

  // What an environment server says about itself: dials, shakes hands, leaves. Throws
  // TransportError after `timeout`, WireError, and RefusedError if it is not as
  // expected.
  static wire::EnvHello probe(const std::string& address, const Security& security,
                              Milliseconds timeout,
                              const ExpectedEnvironment& expected = {},
                              const Interrupt& interrupt = nullptr);

 private:
  std::shared_ptr<PoolStreams> shared_;
};

}  // namespace torchbeast
