// Runs environments against batched inference, and makes rollouts.
//
// Environments are dialled at their servers, or have joined at a Listener. Each stream
// of E environments has a session (env_session.h), which asks the batcher about every
// row and gives every T steps to the queue:
//
//   batcher: (row, agent_state)              [1, E, ...]
//   answer:  (outputs, new_agent_state)      [1, E, ...]; outputs have the action
//   queue:   ((rows, outputs), initial_state)   [T + 1, E, ...]; named: (both, state)
//
// Row 0 of a rollout is the last row of the one before; outputs t answer row t; the
// state is the one before row 0. If `done` is true in a row, the agent begins with a
// new state: the pool hands states back unchanged. If episodes are truncated and the
// outputs have "baseline" and "truncation_value", the batcher is also asked about the
// final observation, and its baseline becomes that row's truncation_value.
//
// An observation is copied once here, from the message into its row; one row of every T
// is copied once more, into row 0 of the next rollout.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
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

// What has happened to streams. The pool does not judge it.
struct PoolFacts {
  // The streams of one origin: of a dialled address, or of a machine from which
  // environments join.
  struct Peer {
    // A stream is there that has made a step, or may still make its first.
    bool is_present = false;
    bool has_delivered = false;  // a stream is there that has given a rollout
    // When a stream was there last that had made a step; min(): not since the last
    // look.
    Clock::time_point proven_at = Clock::time_point::min();
    uint64_t num_failures = 0;  // environments that have raised since the last look
  };
  Clock::time_point time;             // of this look
  bool was_suspended = false;         // the process, before this look
  std::map<std::string, Peer> peers;  // by origin
  std::string last_failure;           // what an environment has raised
  std::string last_error;     // why a stream was lost or refused; empty: none was
  uint64_t num_servers = 0;   // addresses that are dialled
  uint64_t num_refusing = 0;  // of these, refuse this learner for good
  std::string listener;       // its address; empty: there is none
};

struct ActorPoolOptions {
  int64_t unroll_length = 0;  // T >= 1
  bool named_rows = false;    // rows are dicts, else tuples
  // Of all streams' rollouts in progress. A stream that would exceed it is refused.
  uint64_t max_rollout_bytes = 1 << 30;
  std::vector<std::string> addresses;  // one stream each; may occur several times
  Security security;                   // for the addresses
  std::shared_ptr<Listener> listener;  // has been started; may be null
  Milliseconds step_timeout{60'000};   // above 0; then the stream counts as lost
  // An environment that has joined and was lost may come back within this time and goes
  // on in its rollout.
  Milliseconds maximum_downtime{60'000};
  // Decides whether peers end the run: it does by what it throws. None: they never do.
  // run() calls it in its thread, with no lock held, every kInterruptPeriod, and before
  // a server is dialled again. It may block: the limits above are kept meanwhile.
  std::function<void(const PoolFacts&)> check;
  std::optional<wire::EnvHello> hello;  // of all; none: that of the first to connect
  ExpectedEnvironment expected;         // others are refused
  // For the environments' games, with a number that no other stream has had. None: they
  // get neither. With a listener, the listener's counts.
  std::optional<uint64_t> seed;
  // The first stream of address i is number first_stream + i * stream_stride.
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
  uint64_t num_different = 0;  // that have joined and were told to try again
  uint64_t num_env_failures = 0;
  uint64_t bytes_copied = 0;
  uint64_t pool_bytes = 0;  // memory held for rollouts and messages
  double env_seconds = 0;
  double env_wait_seconds = 0;
  double inference_wait_seconds = 0;
  double queue_wait_seconds = 0;
  std::string last_error;
};

class PoolStreams;  // see pool_streams.h

// Thread-safe. Owns the threads of the streams that it dials, one for each. Those of
// joined streams are the listener's.
class ActorPool {
 public:
  // `initial_agent_state`: nest of [layers, n, ...], n = 1 (the same for every
  // environment) or E. Throws std::invalid_argument, also on bad addresses, and if the
  // rollouts of all streams exceed max_rollout_bytes by options.hello.
  ActorPool(ActorPoolOptions options, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher,
            ArrayNest initial_agent_state);
  ~ActorPool();  // closes, and does not wait for run()
  ActorPool(const ActorPool&) = delete;

  // Runs until close() is called or the queue or the batcher is closed; without
  // servers, also until the listener is closed. To be called once. Whatever goes wrong
  // with one peer costs its stream only. The batcher's inputs share memory with the
  // rollout: inference must not write into them. Who answers a batch may send its
  // actions, and put a rollout into the queue, in that call; who makes room in the
  // queue may send actions, too. They never wait there. Throws the first error that
  // ends the run, after it has closed the queue and the batcher: what options.check
  // throws, and
  //   std::invalid_argument  the agent's outputs don't fit; says where
  //   AsyncError             inference failed
  // It may go on for a moment after the pool was destroyed. REQUIRES: what
  // options.check uses lives until it returns.
  void run();

  // Ends run(). May be called from any thread, any number of times.
  void close();

  // The run has learned from its environments. Those that join and differ from them are
  // refused for good from here on; before, they are told to try again later.
  void settle();

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
