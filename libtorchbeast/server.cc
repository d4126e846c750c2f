#include "server.h"

#include <atomic>
#include <iostream>
#include <list>
#include <stdexcept>
#include <utility>

#include "codec.h"
#include "connection.h"
#include "stepper.h"

namespace torchbeast {

struct EnvServer::State {
  State(EnvironmentFactory factory, StreamServerOptions options)
      : factory(std::move(factory)),
        server(
            kStreamMethod, "the learner that has connected from",
            [this](ServedConnection& connection) { serve(connection); },
            std::move(options)) {}

  void serve(ServedConnection& connection) TB_EXCLUDES(mutex);
  // Until the learner ends the stream; throws Connection::Left then.
  void run_stream(ServedConnection& connection) TB_EXCLUDES(mutex);
  void report_stuck();

  // A stream's environment, from before it is made until it is gone.
  struct Served {
    std::string peer;
    Activity activity{nullptr};
  };

  const EnvironmentFactory factory;
  Mutex mutex;
  std::list<Served> served TB_GUARDED_BY(mutex);
  std::atomic<bool> stuck_reported{false};
  std::atomic<uint64_t> num_steps{0};
  std::atomic<uint64_t> bytes_copied{0};
  StreamServer server;  // the first to end
};

// --- One stream

void EnvServer::State::serve(ServedConnection& connection) {
  try {
    run_stream(connection);
  } catch (const WireError&) {
    throw;
  } catch (const TransportError&) {
    throw;
  } catch (const UnusableEnvironment& error) {
    throw RefusedError(error.what());
  } catch (const std::exception& error) {
    connection.write(encode_error(error.what()));
    throw std::runtime_error("the environment failed");
  }
}

void EnvServer::State::run_stream(ServedConnection& connection) {
  const wire::AgentHello agent = connection.expect_agent_hello();
  struct Serving {
    Serving(State* server, std::string peer) : state(*server) {
      MutexLock lock(state.mutex);
      state.served.emplace_front();
      here = state.served.begin();
      here->peer = std::move(peer);
    }
    ~Serving() {
      MutexLock lock(state.mutex);
      state.served.erase(here);
    }
    State& state;
    std::list<Served>::iterator here;
  };
  const Serving serving(this, connection.peer());
  Stepper stepper(factory, &serving.here->activity);
  stepper.begin(agent);
  const auto write_step = [&] {
    bytes_copied += stepper.step_bytes();
    connection.write(stepper.newest_step());
  };
  wire::EnvMessage hello;
  *hello.mutable_hello() = stepper.hello();
  connection.write(encode(hello));
  write_step();
  grpc::ByteBuffer action;
  uint64_t number = 0;
  while (true) {
    connection.read(&action);
    stepper.step(&action, &number);
    num_steps += static_cast<uint64_t>(stepper.num_envs());
    write_step();
  }
}

// --- The server

void EnvServer::State::report_stuck() {
  if (!server.has_given_up() || stuck_reported.exchange(true)) return;
  std::string text = "libtorchbeast: the environment server at " + server.address() +
                     " stopped without waiting for environments that hang:";
  MutexLock lock(mutex);
  for (const Served& one : served) {
    const char* const call = one.activity;
    text += std::string(" ") + (call == nullptr ? "the connection" : call) + " for " +
            one.peer + " has not returned.";
  }
  std::cerr << text + "\n" << std::flush;
}

EnvServer::EnvServer(EnvironmentFactory factory, StreamServerOptions options)
    : state_(std::make_shared<State>(std::move(factory), std::move(options))) {}

EnvServer::~EnvServer() { stop(); }

void EnvServer::start() { state_->server.start(); }

void EnvServer::run(const Interrupt& interrupt) {
  state_->server.run(interrupt);
  state_->report_stuck();
}

void EnvServer::stop(Milliseconds limit) {
  state_->server.stop(limit, state_);
  state_->report_stuck();
}

std::string EnvServer::address() const { return state_->server.address(); }

EnvServerStats EnvServer::stats() const {
  EnvServerStats stats;
  stats.num_streams = state_->server.num_streams();
  stats.num_steps = state_->num_steps;
  stats.num_refused = state_->server.num_refused();
  stats.bytes_copied = state_->bytes_copied;
  return stats;
}

}  // namespace torchbeast
