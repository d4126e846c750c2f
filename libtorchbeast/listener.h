// Offers the learner to environments that dial it: the service Learner of
// proto/torchbeast.proto.
//
// One thread for each stream: it shakes hands, waits until there is a pool, and runs
// the environment there.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "connection.h"
#include "events.h"
#include "expected.h"
#include "stream_server.h"
#include "sync.h"
#include "torchbeast.pb.h"

namespace torchbeast {

// Those of a server; max_streams are the places for environments.
struct ListenerOptions : StreamServerOptions {
  ListenerOptions() { hello_timeout = Milliseconds(60'000); }  // it may need a reset

  // Of the run; none: streams get no seeding.
  std::optional<uint64_t> seed;
  ExpectedEnvironment expected;  // others are refused
};

struct ListenerStats {
  uint64_t num_streams = 0;  // now, also such that wait for a pool
  uint64_t num_refused = 0;  // streams that were turned away
  std::string last_refusal;  // why, or what was raised in place of a hello
};

// Runs the environments that have joined; a pool is one. Thread-safe.
class StreamHost {
 public:
  virtual ~StreamHost() = default;
  // Runs an environment that has shaken hands, in the stream's thread, until it ends.
  virtual End serve(Connection& connection, const wire::EnvHello& hello) = 0;
  // An environment has raised this text. `origin`: of its connection.
  virtual void count_failure(const std::string& text, const std::string& origin) = 0;
};

// Environments that have shaken hands wait for a pool, and then run there. That they
// are alike is the pool's business.
//
// Thread-safe. Owns the streams' threads.
class Listener {
 public:
  // Throws std::invalid_argument on a bad address or insufficient security.
  explicit Listener(ListenerOptions options);
  ~Listener();  // closes
  Listener(const Listener&) = delete;

  void start();  // as StreamServer's
  // As StreamServer::stop, for at most 5 s.
  void close();
  bool is_closed() const;
  // The run is complete. Environments hear that, and don't dial again. Before the
  // pool's close(); close() comes later, and tells those that dial in between, too.
  void finish();

  std::string address() const;  // as StreamServer's
  int max_streams() const;
  ListenerStats stats() const;

  // The hello of the first environment that waits for a pool and keeps the rules; with
  // `other_than`, of one that differs from this, if it comes within `timeout`. Waits
  // for it; throws TransportError after `timeout` if there is none.
  wire::EnvHello probe(Milliseconds timeout, const Interrupt& interrupt = nullptr,
                       const std::optional<wire::EnvHello>& other_than = std::nullopt);
  // What probe() returned is of no use: environments that wait for a pool and have this
  // hello are refused with the reason, and so are others that come with it. probe()
  // then waits for another.
  void refuse(const wire::EnvHello& hello, const std::string& reason);
  // Refused peers, and environments that raised in place of a hello.
  EventLog& events();

  // --- For pools

  // With the next number, for a stream that does not come through this listener.
  std::optional<wire::Seeding> next_seeding();

  // Streams run there from here on. Throws std::invalid_argument if there is a host.
  // REQUIRES: it lives until detach().
  void attach(StreamHost* host);
  // Waits until no stream runs there. Those that come wait for another.
  void detach();

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchbeast
