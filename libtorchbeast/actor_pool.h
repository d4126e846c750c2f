// Runs environments against batched inference, and makes rollouts.
//
// Environments are dialled at their servers, or have joined at a Listener. One thread
// per stream runs its session (env_session.h).
//
// Copies of an observation, each counted in `bytes_copied` of the part that makes it:
// from the message into its row (here), into the inference batch (DynamicBatcher; none
// if the batch has one item), into the learner's batch (BatchingQueue; likewise), and,
// for one row of every T, into row 0 of the next rollout (here). The server makes one,
// from the environment into the message. Memory of rollouts is used again once the
// learner's batch is made.
//
// Inputs of the batcher share memory with the rollout. Inference must not write into
// them.

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

struct ActorPoolOptions {
  int64_t unroll_length = 0;  // T >= 1
  // Whether rows are dicts of fields by name, see ActorPool::run.
  bool named_rows = false;
  // What the rollouts in progress of all streams may have together: rows of
  // environments, whose sizes the environments announce. A stream beyond that is
  // refused. As much again may wait in the queue. 0: half of the memory that this
  // process may use.
  uint64_t max_rollout_bytes = 0;
  // One stream for each entry; an address may occur several times.
  std::vector<std::string> addresses;
  Security security;
  // Where environments may join, if not null; then there may be no addresses. It must
  // have been started, and serves one pool at a time.
  std::shared_ptr<Listener> listener;
  // How long an environment may take for a reset or a step before its stream counts as
  // lost.
  Milliseconds step_timeout{60'000};
  // A stream that is lost, refused or breaks the rules is dialled again, its unfinished
  // rollout dropped. The unroll of a lost environment that had joined is kept for this
  // long, so that it may come back and go on. If no environment at all has been
  // connected for this long, the run ends with the last error.
  Milliseconds maximum_downtime{60'000};
  // An environment that raises costs its stream. If more than so many do within a
  // minute, the run ends with the last one's traceback.
  int64_t max_env_failures = 10;
  // What all environments must be, as probe() found it at the first address or the
  // listener. If not given, the first to connect is the measure.
  std::optional<wire::EnvHello> hello;
  ExpectedEnvironment expected;  // others are refused
  // Of the run; none: dialled streams get no seeding. The first stream of address i is
  // number first_stream + i * stream_stride; each stream after a loss has the next
  // number that is unused. With a listener it says seeds and numbers.
  std::optional<uint64_t> seed;
  uint64_t first_stream = 0;
  uint64_t stream_stride = 1;
};

struct ActorPoolStats {
  uint64_t num_steps = 0;       // environment steps: E for each message after the first
  uint64_t num_rollouts = 0;    // rollouts enqueued, each of E environments
  uint64_t num_reconnects = 0;  // streams that were lost and came back
  // Environment steps of rollouts that were given up after a loss; those that a run
  // leaves unfinished when it ends are not counted.
  uint64_t num_dropped_steps = 0;
  uint64_t num_connected = 0;     // streams now
  uint64_t num_refused = 0;       // dialled streams whose peers broke a rule or refused
  uint64_t num_env_failures = 0;  // environments that have raised
  uint64_t bytes_received = 0;
  uint64_t bytes_copied = 0;
  uint64_t pool_bytes = 0;  // memory held for rollouts and messages
  double env_seconds = 0;   // what environments have needed for steps and resets
  // Summed over threads: waiting for environments and wire, for inference, for room in
  // the learner's queue.
  double env_wait_seconds = 0;
  double inference_wait_seconds = 0;
  double queue_wait_seconds = 0;
  std::string last_error;  // why a stream was lost last
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
  // once. Whatever goes wrong with one peer costs its stream only. Throws the first
  // error that ends the run, with its cause:
  //   std::invalid_argument  the agent's outputs or the state don't fit; says where
  //   TransportError         there was no stream at all for too long, or all servers
  //                          refuse for good
  //   EnvironmentError       environments raised too often; the last one's traceback
  //   AsyncError             inference failed
  //
  // Hands the batcher ((observation, reward, done, episode_step, episode_return),
  // agent_state), arrays [1, E, ...]; if the environment has extra fields, a dict of
  // these comes sixth. Wants ((action, ...), new_agent_state), the outputs being a
  // vector or a dict with the key "action". Enqueues ((env_outputs, agent_outputs),
  // initial_agent_state), arrays [T+1, E, ...].
  //
  // With named_rows, it hands the batcher (row, agent_state), wants a dict of outputs,
  // and enqueues (rows, initial_agent_state). A row is a dict of observation, reward,
  // done, episode_step, episode_return, the extra fields, and of game_over, game_step
  // and game_return: those of the episode, unless the environment has these fields. The
  // rows for the learner have the agent's outputs, too; if an environment has a field
  // of the same name, the agent's replaces it.
  //
  // If a step brings the final observation of truncated episodes and the outputs are
  // a dict with "baseline" and "truncation_value" (both float32 [1, E]), the batcher is
  // asked about it too, with the state before the step, and its baseline becomes the
  // truncation_value of the truncated episodes in that row.
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
