#include "server.h"

#include <atomic>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <utility>

#include "codec.h"
#include "connection.h"
#include "env_runner.h"

namespace torchbeast {

struct EnvServer::State {
  State(EnvironmentFactory factory, StreamServerOptions options)
      : factory(std::move(factory)),
        server(
            kStreamMethod, "the learner that has connected from",
            [this](ServedConnection& connection) { return serve(connection); },
            std::move(options)) {}

  End serve(ServedConnection& connection) TB_EXCLUDES(mutex);
  struct Guest;
  // Returns how the stream ends.
  End run_stream(ServedConnection& connection, Guest* guest = nullptr)
      TB_EXCLUDES(mutex);
  // Throws how it ends.
  void play(ServedConnection& connection, EnvRunner& runner, Guest* guest)
      TB_EXCLUDES(mutex);
  // run_stream() in the thread of run(), which blocks this one. Nothing: that thread
  // takes no streams, or it has another one.
  std::optional<End> run_as_guest(ServedConnection& connection) TB_EXCLUDES(mutex);
  void host_guests(const Interrupt& interrupt) TB_EXCLUDES(mutex);
  Guest* next_guest(const Interrupt& interrupt) TB_EXCLUDES(mutex);
  void end_guest(const End& end) TB_EXCLUDES(mutex);
  void report_stuck();

  // A stream in the thread of run().
  struct Guest {
    ServedConnection& connection;
    std::optional<End> end{};
    std::atomic<bool> plays{false};  // it has had an action
  };

  const EnvironmentFactory factory;
  Mutex mutex;
  CondVar changed;
  bool hosts TB_GUARDED_BY(mutex) = false;  // run() takes guests, or will
  bool runs TB_GUARDED_BY(mutex) = false;   // it has begun
  bool stopping TB_GUARDED_BY(mutex) = false;
  Guest* guest TB_GUARDED_BY(mutex) = nullptr;
  std::atomic<bool> stuck_reported{false};
  std::atomic<uint64_t> num_steps{0};
  std::atomic<uint64_t> bytes_copied{0};
  StreamServer server;  // the first to end
};

// --- One stream

End EnvServer::State::serve(ServedConnection& connection) {
  const std::optional<End> end = run_as_guest(connection);
  return end ? *end : run_stream(connection);
}

End EnvServer::State::run_stream(ServedConnection& connection, Guest* guest) {
  std::optional<EnvRunner> runner;
  const End end = end_of([&] {
    const wire::AgentHello agent = connection.expect_agent_hello();
    runner.emplace(factory, &connection.activity);
    runner->begin(agent);
    play(connection, *runner, guest);
  });
  if (!end.is_own()) return end;
  // Before the environment is closed, which may hang.
  connection.write(encode_error(end.text));
  return {End::kFailed, "the environment failed"};
}

void EnvServer::State::play(ServedConnection& connection, EnvRunner& runner,
                            Guest* guest) {
  const auto write_step = [&] {
    bytes_copied += runner.step_bytes();
    runner.send_to(connection);
  };
  connection.introduce(runner.hello());
  write_step();
  grpc::ByteBuffer action;
  uint64_t number = 0;
  while (true) {
    connection.read(&action);
    if (guest != nullptr && !guest->plays) {
      {
        const MutexLock lock(mutex);  // for sleepers
        guest->plays = true;
      }
      changed.notify_all();
    }
    runner.step(&action, &number);
    num_steps += static_cast<uint64_t>(runner.num_envs());
    write_step();
  }
}

std::optional<End> EnvServer::State::run_as_guest(ServedConnection& connection) {
  Guest me{connection};
  MutexLock lock(mutex);
  // A guest will leave soon if its learner has gone, or only asks what is served.
  const auto deadline = time_after(kStopLimit);
  while (hosts && guest != nullptr && Clock::now() < deadline &&
         (guest->connection.is_gone() || !guest->plays)) {
    changed.wait_until(mutex, deadline, nullptr);
  }
  if (!hosts || guest != nullptr) return std::nullopt;
  guest = &me;
  changed.notify_all();
  while (!me.end) changed.wait_until(mutex, Clock::time_point::max(), nullptr);
  return me.end;
}

// Null: the server is to stop.
EnvServer::State::Guest* EnvServer::State::next_guest(const Interrupt& interrupt) {
  MutexLock lock(mutex);
  while (guest == nullptr && !stopping) {
    changed.wait_until(mutex, Clock::time_point::max(), interrupt);
  }
  return guest;
}

void EnvServer::State::end_guest(const End& end) {
  MutexLock lock(mutex);
  if (guest == nullptr) return;
  guest->end = end;
  guest = nullptr;
  changed.notify_all();
}

void EnvServer::State::host_guests(const Interrupt& interrupt) {
  {
    MutexLock lock(mutex);
    if (std::exchange(runs, true)) {
      throw std::runtime_error("the server runs already, in another thread");
    }
  }
  const AtEnd removal([this] {  // also if `interrupt` throws
    {
      MutexLock lock(mutex);
      hosts = false;
    }
    end_guest({});
  });
  while (Guest* const next = next_guest(interrupt)) {
    end_guest(end_of([&] {
      const auto as_handler = server.as_handler();
      return run_stream(next->connection, next);
    }));
    if (interrupt) interrupt();
  }
}

// --- The server

void EnvServer::State::report_stuck() {
  if (!server.has_given_up() || stuck_reported.exchange(true)) return;
  std::string text = "libtorchbeast: the environment server at " + server.address() +
                     " stopped without waiting for environments that hang:";
  server.for_each_stream([&text](const ServedConnection& connection) {
    const char* const call = connection.activity;
    text += std::string(" ") + (call == nullptr ? "the connection" : call) + " for " +
            connection.peer() + " has not returned.";
  });
  std::cerr << text + "\n" << std::flush;
}

EnvServer::EnvServer(EnvironmentFactory factory, StreamServerOptions options)
    : state_(std::make_shared<State>(std::move(factory), std::move(options))) {}

EnvServer::~EnvServer() { stop(); }

void EnvServer::start(bool here) {
  bool before;
  {
    MutexLock lock(state_->mutex);
    before = std::exchange(state_->hosts, here);
  }
  try {
    state_->server.start();
  } catch (...) {
    MutexLock lock(state_->mutex);
    state_->hosts = before;
    throw;
  }
}

void EnvServer::run(const Interrupt& interrupt) {
  bool hosts;
  {
    MutexLock lock(state_->mutex);
    hosts = state_->hosts;
  }
  if (hosts) state_->host_guests(interrupt);
  state_->server.run(interrupt);
  state_->report_stuck();
}

void EnvServer::stop(Milliseconds limit) {
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
    if (!state_->runs) {  // nobody else will end the guest
      state_->hosts = false;
      if (state_->guest != nullptr) state_->guest->end = End{};
      state_->guest = nullptr;
    }
  }
  state_->changed.notify_all();
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
