// ActorPool and EnvServer together, over real sockets in one process.

#include "actor_pool.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <fstream>
#include <future>

#include "server.h"
#include "session.h"

namespace torchbeast {
namespace {

StreamServerOptions server_options(const std::string& address) {
  StreamServerOptions options;
  options.address = address;
  return options;
}

class ActorPoolTest : public GuardedTest {
 protected:
  ActorPoolTest() : directory_(temporary_directory()) {}
  ~ActorPoolTest() override { rmdir(directory_.c_str()); }

  std::string path(const std::string& name) const { return directory_ + "/" + name; }
  std::string unix_address(const std::string& name = "s") const {
    return "unix:" + path(name);
  }

  // Each stream has the next number.
  EnvironmentFactory counting(int64_t num_envs, bool with_truncation = true) {
    return [this, num_envs, with_truncation] {
      return std::make_unique<CountingEnvironment>(num_streams_++, num_envs,
                                                   with_truncation);
    };
  }

  static ActorPoolOptions pool_options(std::vector<std::string> addresses,
                                       int64_t T = 5) {
    ActorPoolOptions options;
    options.unroll_length = T;
    options.addresses = std::move(addresses);
    options.maximum_downtime = Milliseconds(10'000);
    return options;
  }

  const std::string directory_;
  std::atomic<int64_t> num_streams_{0};
};

TEST_F(ActorPoolTest, RolloutsAreWhatHappened) {
  EnvServer local(counting(3), server_options(unix_address()));
  EnvServer remote(counting(3), server_options("127.0.0.1:0"));
  local.start();
  remote.start();
  Session run(pool_options({local.address(), remote.address(), local.address()}));
  Checker checker(5, true);
  while (checker.num_rollouts < 60) {
    const ArrayNest rollout = run.rollouts();
    ASSERT_NO_FATAL_FAILURE(checker.check(rollout));
  }
  EXPECT_EQ(checker.num_environments(), 9u);
  EXPECT_EQ(local.stats().num_streams, 2u);
  const ActorPoolStats stats = run.pool().stats();
  EXPECT_GE(stats.num_steps, 60u * 5 * 3);
  EXPECT_EQ(stats.num_connected, 3u);
  EXPECT_EQ(stats.num_reconnects, 0u);
  EXPECT_GT(stats.bytes_copied, stats.num_steps * 14);
  run.end();
  EXPECT_EQ(run.pool().stats().num_connected, 0u);
  local.stop();
  EXPECT_EQ(local.stats().num_steps + remote.stats().num_steps >= 60 * 5 * 3, true);
}

TEST_F(ActorPoolTest, StreamsOfOneRolloutLengthOne) {
  EnvServer server(counting(1, false), server_options(unix_address()));
  server.start();
  Session run(pool_options({server.address(), server.address()}, 1));
  Checker checker(1, false);
  for (int i = 0; i < 40; ++i) {
    const ArrayNest rollout = run.rollouts();
    ASSERT_NO_FATAL_FAILURE(checker.check(rollout));
  }
}

TEST_F(ActorPoolTest, JoinsRolloutsOfSeveralStreams) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  Session run(pool_options({server.address(), server.address(), server.address()}), 6,
              6);
  // Which streams a batch holds is a matter of time; each column is checked.
  Checker checker(5, true);
  for (int i = 0; i < 10; ++i) {
    const ArrayNest rollouts = run.rollouts();
    EXPECT_EQ(rollouts.front().shape()[1], 6);
    ASSERT_NO_FATAL_FAILURE(checker.check(rollouts));
  }
}

TEST_F(ActorPoolTest, OutputsMayBeATuple) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  auto queue = std::make_shared<BatchingQueue>(batching(1, 2));
  auto batcher = std::make_shared<DynamicBatcher>(batching(1, 2));
  ActorPool pool(pool_options({server.address()}), queue, batcher, ArrayNest());
  Threads threads;
  threads.start([&] {
    while (auto batch = batcher->next()) {
      batch->set_outputs(ArrayNest(ArrayNest::Vector{
          ArrayNest(ArrayNest::Vector{[&] {
            auto memory = std::make_shared<std::vector<int64_t>>(2, 3);
            return Array({DType::kInt64, {1, 2}},
                         reinterpret_cast<uint8_t*>(memory->data()), memory);
          }()}),
          ArrayNest()}));
    }
  });
  threads.start([&] { pool.run(); });
  for (int i = 0; i < 5; ++i) {
    const ArrayNest rollout = queue->dequeue().value();
    EXPECT_EQ(rollout.vector()[0].vector()[1].vector().size(), 1u);
    EXPECT_TRUE(rollout.vector()[1].empty());
  }
  batcher->close();  // ends the pool too
  threads.join();
}

// --- What ends a run
// ------------------------------------------------------------------

TEST_F(ActorPoolTest, ClosingTheQueueEndsTheRun) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  Session run(pool_options({server.address()}));
  run.rollouts();
  run.queue().close();
  run.wait();
}

TEST_F(ActorPoolTest, AnEnvironmentsErrorReachesTheRun) {
  class Failing : public CountingEnvironment {
   public:
    using CountingEnvironment::CountingEnvironment;
    EnvRow step(const std::vector<Array>& action) override {
      if (++count_ == 8) throw std::runtime_error("Traceback: it broke in step 8");
      return CountingEnvironment::step(action);
    }

   private:
    int count_ = 0;
  };
  EnvServer server([] { return std::make_unique<Failing>(0, 2); },
                   server_options(unix_address()));
  server.start();
  ActorPoolOptions options = pool_options({server.address()});
  options.max_env_failures = 0;
  Session run(options);
  const std::string error = error_of<std::runtime_error>([&] { run.wait(); });
  EXPECT_NE(error.find("Traceback: it broke in step 8"), std::string::npos) << error;
  EXPECT_NE(error.find(directory_), std::string::npos) << error;
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 2) << "of the second rollout";
}

TEST_F(ActorPoolTest, AFactorysErrorReachesTheRun) {
  EnvServer server(
      []() -> std::unique_ptr<Environment> {
        throw std::runtime_error("no such game");
      },
      server_options(unix_address()));
  server.start();
  ActorPoolOptions options = pool_options({server.address()});
  options.max_env_failures = 2;
  Session run(options);
  const std::string error = error_of<EnvironmentError>([&] { run.wait(); });
  EXPECT_NE(error.find("more than 2 environments"), std::string::npos) << error;
  EXPECT_NE(error.find("no such game"), std::string::npos) << error;
  EXPECT_EQ(run.pool().stats().num_env_failures, 3u);
}

// How many events of a kind the pool has noted since the last time.
int64_t count_events(ActorPool& pool, Event::Kind kind) {
  const std::vector<Event> events = pool.events().take().first;
  return std::count_if(events.begin(), events.end(),
                       [kind](const Event& event) { return event.kind == kind; });
}

TEST_F(ActorPoolTest, AnEnvironmentThatRaisesCostsItsStream) {
  class Failing : public CountingEnvironment {
   public:
    using CountingEnvironment::CountingEnvironment;
    EnvRow step(const std::vector<Array>& action) override {
      if (++count_ == 12) throw std::runtime_error("Traceback: it broke in step 12");
      return CountingEnvironment::step(action);
    }

   private:
    int count_ = 0;
  };
  // Numbers from 5 on: the other server has 0.
  std::atomic<int64_t> number{5};
  EnvServer bad([&] { return std::make_unique<Failing>(number++, 2); },
                server_options(unix_address("bad")));
  EnvServer good(counting(2), server_options(unix_address("good")));
  bad.start();
  good.start();
  ActorPoolOptions options = pool_options({bad.address(), good.address()});
  options.max_env_failures = 1000;
  Session run(options);
  Checker checker(5, true);
  while (run.pool().stats().num_reconnects < 3) {
    ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  }
  const ActorPoolStats stats = run.pool().stats();
  EXPECT_GE(stats.num_env_failures, 3u);
  EXPECT_EQ(stats.num_dropped_steps, 2 * stats.num_env_failures) << "1 of 11, times 2";
  const std::vector<Event> events = run.pool().events().take().first;
  ASSERT_GE(events.size(), 2u);
  EXPECT_EQ(events[0].kind, Event::kEnvError);
  EXPECT_NE(events[0].text.find("bad failed"), std::string::npos) << events[0].text;
  EXPECT_NE(events[0].text.find("it broke in step 12"), std::string::npos);
  EXPECT_EQ(events[1].kind, Event::kReturned);
}

TEST_F(ActorPoolTest, DifferentEnvironmentsAreRefused) {
  EnvServer a(counting(2), server_options(unix_address("a")));
  EnvServer b(counting(3), server_options(unix_address("b")));
  a.start();
  b.start();
  ActorPoolOptions options = pool_options({a.address(), b.address()});
  options.hello = ActorPool::probe(a.address(), {}, Milliseconds(10'000));
  {
    Session run(options);
    while (run.pool().stats().num_refused == 0) run.rollouts();
    for (int i = 0; i < 5; ++i) run.rollouts();
    const std::string error = run.pool().stats().last_error;
    EXPECT_NE(error.find("differ"), std::string::npos) << error;
    EXPECT_NE(error.find("num_envs: 2 -> 3"), std::string::npos) << error;
    EXPECT_EQ(count_events(run.pool(), Event::kRefused), 1);
  }
  // If that is so of all, the run ends at once.
  options.addresses = {b.address(), b.address()};
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_NE(error.find("differ"), std::string::npos) << error;
}

TEST_F(ActorPoolTest, StreamsBeyondTheMemoryAreRefused) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  ActorPoolOptions options = pool_options({server.address(), server.address()});
  // Of the 6 rows of a rollout: picture, position, the four numbers and truncated.
  constexpr uint64_t kRolloutBytes = 6 * 2 * (6 + 8 + 4 + 1 + 8 + 4 + 1);
  options.max_rollout_bytes = 2 * kRolloutBytes - 1;
  {
    Session run(options);
    Checker checker(5, true);
    while (run.pool().stats().num_refused == 0 || checker.num_rollouts < 5) {
      ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
    }
    EXPECT_EQ(checker.num_environments(), 2u);
    const std::string error = run.pool().stats().last_error;
    EXPECT_NE(error.find("no memory for a rollout"), std::string::npos) << error;
    EXPECT_NE(error.find(std::to_string(2 * kRolloutBytes - 1)), std::string::npos)
        << error;
  }
  // If the hello is known, so is the sum.
  options.hello = ActorPool::probe(server.address(), {}, Milliseconds(10'000));
  const std::string error =
      error_of<std::invalid_argument>([&] { Session run(options); });
  EXPECT_NE(error.find("rollouts of 2 streams"), std::string::npos) << error;
  options.max_rollout_bytes = 2 * kRolloutBytes;
  Session run(options);
  while (run.pool().stats().num_connected < 2) run.rollouts();
}

TEST_F(ActorPoolTest, WrongActionsAreRefused) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  auto queue = std::make_shared<BatchingQueue>(batching(1, 2));
  auto batcher = std::make_shared<DynamicBatcher>(batching(1, 2));
  ActorPool pool(pool_options({server.address()}), queue, batcher, ArrayNest());
  Threads threads;
  threads.start([&] {
    while (auto batch = batcher->next()) {
      batch->set_outputs(ArrayNest(ArrayNest::Vector{
          ArrayNest(ArrayNest::Vector{make_array({1, 2}, {0, 0})}), ArrayNest()}));
    }
  });
  const std::string error = error_of<std::invalid_argument>([&] { pool.run(); });
  EXPECT_NE(error.find("int32 [2]"), std::string::npos) << error;
  EXPECT_NE(error.find("int64 [2]"), std::string::npos) << error;
  batcher->close();
}

TEST_F(ActorPoolTest, ADroppedBatchEndsTheRun) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  auto queue = std::make_shared<BatchingQueue>(batching(1, 2));
  auto batcher = std::make_shared<DynamicBatcher>(batching(1, 2));
  ActorPool pool(pool_options({server.address()}), queue, batcher, ArrayNest());
  Threads threads;
  threads.start([&] { batcher->next(); });
  EXPECT_THROW(pool.run(), AsyncError);
}

TEST_F(ActorPoolTest, ACloseWhileNothingIsThereIsQuick) {
  Session run(pool_options({unix_address("nobody")}));
  run.end();
}

TEST_F(ActorPoolTest, NobodyThereEndsTheRun) {
  ActorPoolOptions options = pool_options({unix_address("nobody")});
  options.maximum_downtime = Milliseconds(300);
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_NE(error.find("no connection for 0.3 s"), std::string::npos) << error;
  EXPECT_NE(error.find("nobody"), std::string::npos) << error;
}

TEST_F(ActorPoolTest, ASilentPeerEndsTheRun) {
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  path("silent").copy(name.sun_path, sizeof(name.sun_path) - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  ActorPoolOptions options = pool_options({unix_address("silent")});
  options.step_timeout = Milliseconds(300);
  options.maximum_downtime = Milliseconds(500);
  {
    Session run(options);
    const std::string error = error_of<TransportError>([&] { run.wait(); });
    EXPECT_NE(error.find("has not answered within the step timeout"), std::string::npos)
        << error;
  }
  close(listener);
  unlink(path("silent").c_str());
}

TEST_F(ActorPoolTest, AStuckEnvironmentCountsAsLost) {
  class Stuck : public CountingEnvironment {
   public:
    Stuck(std::shared_future<void> release, bool stuck)
        : CountingEnvironment(0, 2), release_(std::move(release)), stuck_(stuck) {}
    EnvRow step(const std::vector<Array>& action) override {
      if (stuck_ && ++count_ == 8) release_.wait();
      return CountingEnvironment::step(action);
    }

   private:
    const std::shared_future<void> release_;
    const bool stuck_;
    int count_ = 0;
  };
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  EnvServer server(
      [&] { return std::make_unique<Stuck>(released, num_streams_++ == 0); },
      server_options(unix_address()));
  server.start();
  ActorPoolOptions options = pool_options({server.address()});
  options.step_timeout = Milliseconds(300);
  Session run(options);
  while (run.pool().stats().num_reconnects == 0) run.rollouts();
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 2);
  EXPECT_NE(run.pool().stats().last_error.find("step timeout"), std::string::npos);
  run.end();
  release.set_value();
}

TEST_F(ActorPoolTest, AServerThatAlwaysHangsCostsItsStream) {
  // Sends one step, then nothing.
  StreamService service([&](grpc::ServerContext*, ServedStream* stream) {
    CountingEnvironment environment(0, 2);
    grpc::ByteBuffer message;
    stream->Read(&message);
    wire::EnvMessage hello;
    *hello.mutable_hello() = environment.hello();
    stream->Write(encode(hello));
    MemoryPool pool;
    stream->Write(encode_step(environment.reset(), pool));
    while (stream->Read(&message)) {
    }
    return grpc::Status::OK;
  });
  grpc::ServerBuilder builder;
  builder.AddListeningPort(unix_address("x"), grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const auto hanging = builder.BuildAndStart();
  EnvServer good(counting(2), server_options(unix_address()));
  good.start();
  ActorPoolOptions options = pool_options({unix_address("x"), good.address()});
  options.step_timeout = Milliseconds(300);
  options.maximum_downtime = Milliseconds(700);
  {
    Session run(options);
    const auto begin = Clock::now();
    run.rollouts();
    // Noticed within the step timeout.
    while (run.pool().events().take().first.empty()) run.rollouts();
    EXPECT_LT(Clock::now() - begin, Milliseconds(30'000));
    // The others go on for longer than any limit.
    while (run.pool().stats().num_reconnects < 3) run.rollouts();
    EXPECT_EQ(run.pool().stats().num_dropped_steps, 0u) << "it never made any";
    run.end();
  }
  // With nobody else the run ends.
  good.stop();
  options.addresses = {unix_address("x")};
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_NE(error.find("no connection for 0.7 s"), std::string::npos) << error;
  EXPECT_NE(error.find("step timeout"), std::string::npos) << error;
  hanging->Shutdown(std::chrono::system_clock::now());
}

// --- Losses that a run survives
// -------------------------------------------------------

TEST_F(ActorPoolTest, AServerThatComesBackIsFound) {
  auto server =
      std::make_unique<EnvServer>(counting(2), server_options(unix_address()));
  server->start();
  Session run(pool_options({server->address(), server->address()}));
  Checker checker(5, true);
  while (checker.num_environments() < 4) {
    ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  }
  server->stop();
  server = std::make_unique<EnvServer>(counting(2), server_options(unix_address()));
  server->start();
  // New streams have new numbers; whatever comes is whole.
  while (checker.num_environments() < 8) {
    ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  }
  EXPECT_EQ(run.pool().stats().num_reconnects, 2u);
}

TEST_F(ActorPoolTest, AServerThatAlwaysBreaksEndsTheRun) {
  // Ends each stream after some steps, as a crashing process does.
  std::unique_ptr<EnvServer> server;
  StreamService service([&](grpc::ServerContext*, ServedStream* stream) {
    CountingEnvironment environment(0, 2);
    grpc::ByteBuffer message;
    stream->Read(&message);
    wire::EnvMessage hello;
    *hello.mutable_hello() = environment.hello();
    stream->Write(encode(hello));
    MemoryPool pool;
    stream->Write(encode_step(environment.reset(), pool));
    stream->Read(&message);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "crashed");
  });
  grpc::ServerBuilder builder;
  builder.AddListeningPort(unix_address("x"), grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const auto crashing = builder.BuildAndStart();
  ActorPoolOptions options = pool_options({unix_address("x")});
  options.maximum_downtime = Milliseconds(1'000);
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_NE(error.find("no connection for 1 s"), std::string::npos) << error;
  EXPECT_NE(error.find("crashed"), std::string::npos) << error;
  crashing->Shutdown(std::chrono::system_clock::now());
}

// --- Peers that lie
// -------------------------------------------------------------------

// Runs against a server that sends `messages` to whoever says hello.
std::string error_against(const std::string& address,
                          const std::vector<grpc::ByteBuffer>& messages,
                          ActorPoolOptions options) {
  StreamService service([&](grpc::ServerContext*, ServedStream* stream) {
    grpc::ByteBuffer message;
    stream->Read(&message);
    for (const grpc::ByteBuffer& m : messages) {
      grpc::ByteBuffer copied = m;
      stream->Write(copied);
      if (&m != &messages[0]) stream->Read(&message);
    }
    return grpc::Status::OK;
  });
  grpc::ServerBuilder builder;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  options.maximum_downtime = Milliseconds(0);
  std::string error;
  {
    Session run(options);
    error = error_of<std::exception>([&] { run.wait(); });
  }
  server->Shutdown(std::chrono::system_clock::now());
  return error;
}

TEST_F(ActorPoolTest, LiesAreRefused) {
  MemoryPool pool;
  CountingEnvironment environment(0, 2);
  const auto row = environment.reset();
  wire::EnvMessage hello;
  *hello.mutable_hello() = environment.hello();
  const auto against = [&](const std::vector<grpc::ByteBuffer>& messages) {
    return error_against(unix_address("liar"), messages,
                         pool_options({unix_address("liar")}));
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };

  contains(against({encode_step(row, pool)}), "before the hello");

  auto arrays = row.arrays;
  arrays[0] = pool.allocate({DType::kUint8, {2, 2, 4}});
  contains(against({encode(hello), encode_step({arrays, {}, 0}, pool)}),
           "step: 68 bytes, and the spaces of the hello make 64");
  arrays = row.arrays;
  arrays.pop_back();
  contains(against({encode(hello), encode_step({arrays, {}, 0}, pool)}),
           "step: 62 bytes");
  contains(against({encode(hello), encode(hello)}), "second hello");
  contains(against({encode(hello), encode_step({row.arrays, {arrays[0]}, 0}, pool)}),
           "final_observation: 12 bytes");
  contains(against({encode(hello),
                    encode_step({row.arrays, {arrays[0], arrays[1]}, 0}, pool)}),
           "no episode is truncated");
  arrays = row.arrays;
  arrays[6] = pool.allocate({DType::kBool, {2}});
  arrays[6].data()[0] = 0;
  arrays[6].data()[1] = 1;
  contains(against({encode(hello), encode_step({arrays, {}, 0}, pool)}),
           "final_observation is missing");

  wire::EnvMessage other = hello;
  other.mutable_hello()->set_version(77);
  contains(against({encode(other)}), "77");

  arrays = row.arrays;
  arrays[2] = pool.allocate({DType::kFloat32, {2}});
  arrays[2].as<float>()[0] = 0;
  arrays[2].as<float>()[1] = std::numeric_limits<float>::infinity();
  contains(against({encode(hello), encode_step({arrays, {}, 0}, pool)}),
           "liar breaks the rules: reward: inf in environment 1");

  const grpc::Slice garbage(std::string(1000, '\xff'));
  contains(against({grpc::ByteBuffer(&garbage, 1)}), "breaks the rules");
}

// --- The server
// -----------------------------------------------------------------------

TEST_F(ActorPoolTest, SocketsArePrivateAndRemoved) {
  EnvServer server(counting(1), server_options(unix_address()));
  server.start();
  struct stat status;
  ASSERT_EQ(stat(path("s").c_str(), &status), 0);
  EXPECT_TRUE(S_ISSOCK(status.st_mode));
  EXPECT_EQ(status.st_mode & 0777, 0600u);

  EnvServer second(counting(1), server_options(unix_address()));
  const std::string error = error_of<std::runtime_error>([&] { second.start(); });
  EXPECT_NE(error.find("another server listens there"), std::string::npos) << error;
  ASSERT_EQ(stat(path("s").c_str(), &status), 0) << "the first server's socket";

  server.stop();
  EXPECT_NE(stat(path("s").c_str(), &status), 0);
  server.stop();
}

TEST_F(ActorPoolTest, StaleSocketsAreReplaced) {
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  path("s").copy(name.sun_path, sizeof(name.sun_path) - 1);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  close(listener);  // the socket file stays
  EnvServer server(counting(1), server_options(unix_address()));
  server.start();
  ActorPool::probe(unix_address(), {}, Milliseconds(10'000));
}

TEST_F(ActorPoolTest, PathsThatCannotBe) {
  std::ofstream(path("file")) << "precious";
  EnvServer on_file(counting(1), server_options(unix_address("file")));
  EXPECT_NE(error_of<std::runtime_error>([&] { on_file.start(); }).find("not a socket"),
            std::string::npos);
  std::string text;
  std::ifstream(path("file")) >> text;
  EXPECT_EQ(text, "precious");
  unlink(path("file").c_str());

  EnvServer nowhere(counting(1), server_options(unix_address("no/where")));
  const std::string error = error_of<std::runtime_error>([&] { nowhere.start(); });
  EXPECT_NE(error.find("No such file or directory"), std::string::npos) << error;

  const std::string too_long = unix_address(std::string(200, 'x'));
  EXPECT_THROW(EnvServer(counting(1), server_options(too_long)), std::invalid_argument);
}

TEST_F(ActorPoolTest, PortsThatAreTaken) {
  EnvServer server(counting(1), server_options("127.0.0.1:0"));
  server.start();
  EnvServer second(counting(1), server_options(server.address()));
  const std::string error = error_of<std::runtime_error>([&] { second.start(); });
  EXPECT_NE(error.find("in use"), std::string::npos) << error;
}

TEST_F(ActorPoolTest, TokensAreChecked) {
  StreamServerOptions options = server_options(unix_address());
  options.security.token = "a-secret";
  EnvServer server(counting(1), options);
  server.start();
  for (const std::string token : {"", "a-secre", "a-secret-", "b-secret"}) {
    Security security;
    security.token = token;
    const std::string error = error_of<RefusedError>(
        [&] { ActorPool::probe(unix_address(), security, Milliseconds(10'000)); });
    EXPECT_NE(error.find("token"), std::string::npos) << error;
  }
  Security security;
  security.token = "a-secret";
  const wire::EnvHello hello =
      ActorPool::probe(unix_address(), security, Milliseconds(10'000));
  EXPECT_EQ(hello.environment(), "Counting-v0");
  EXPECT_EQ(server.stats().num_refused, 4u);
}

TEST_F(ActorPoolTest, TokensThatCannotTravelAreRefused) {
  StreamServerOptions options = server_options(unix_address());
  options.security.token = "a secret";
  EXPECT_THROW(EnvServer(counting(1), options), std::invalid_argument);
  Security security;
  security.token = "two\nlines";
  EXPECT_THROW(ActorPool::probe(unix_address(), security, Milliseconds(10'000)),
               std::invalid_argument);
}

TEST_F(ActorPoolTest, AWrongTokenEndsTheRunAtOnce) {
  StreamServerOptions options = server_options(unix_address());
  options.security.token = "a-secret";
  EnvServer server(counting(1), options);
  server.start();
  Session run(pool_options({server.address()}));
  EXPECT_THROW(run.wait(), RefusedError);
  EXPECT_EQ(server.stats().num_refused, 1u);
}

TEST_F(ActorPoolTest, StreamsAreLimited) {
  StreamServerOptions options = server_options(unix_address());
  options.max_streams = 1;
  EnvServer server(counting(1), options);
  server.start();
  Session run(pool_options({server.address()}));
  run.rollouts();
  const std::string error = error_of<TransportError>(
      [&] { ActorPool::probe(server.address(), {}, Milliseconds(10'000)); });
  EXPECT_NE(error.find("1 streams already"), std::string::npos) << error;
}

TEST_F(ActorPoolTest, SilentLearnersAreCut) {
  StreamServerOptions options = server_options(unix_address());
  options.hello_timeout = Milliseconds(300);
  EnvServer server(counting(1), options);
  server.start();
  auto channel = grpc::CreateCustomChannel(
      unix_address(), grpc::InsecureChannelCredentials(), channel_arguments());
  grpc::ClientContext context;
  const auto stream = open_stream(channel.get(), &context);
  grpc::ByteBuffer message;
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(ActorPoolTest, LearnersThatLieAreRefused) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  MemoryPool pool;
  const auto status_after = [&](const std::vector<grpc::ByteBuffer>& messages) {
    auto channel = grpc::CreateCustomChannel(
        unix_address(), grpc::InsecureChannelCredentials(), channel_arguments());
    grpc::ClientContext context;
    const auto stream = open_stream(channel.get(), &context);
    for (grpc::ByteBuffer message : messages) stream->Write(message);
    grpc::ByteBuffer message;
    while (stream->Read(&message)) {
    }
    return stream->Finish();
  };
  wire::AgentMessage hello;
  hello.mutable_hello()->set_version(kWireVersion);
  const Array wide = pool.allocate({DType::kInt64, {1000}});
  const Array narrow = pool.allocate({DType::kInt64, {2}});
  EXPECT_EQ(status_after({encode_action({narrow}, pool)}).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status_after({encode(hello), encode_action({wide}, pool)}).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(
      status_after({encode(hello), encode_action({narrow, narrow}, pool)}).error_code(),
      grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status_after({encode(hello), encode_action({}, pool)}).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  hello.mutable_hello()->set_version(1);
  const grpc::Status status = status_after({encode(hello)});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_NE(status.error_message().find("speaks version 1 of the protocol"),
            std::string::npos);
}

TEST_F(ActorPoolTest, StoppingEndsRunAndMayBeRepeated) {
  EnvServer server(counting(1), server_options(unix_address()));
  auto done = std::async(std::launch::async, [&] { server.run(); });
  Session run(pool_options({unix_address()}));
  run.rollouts();
  std::vector<std::future<void>> stops;
  for (int i = 0; i < 3; ++i) {
    stops.push_back(std::async(std::launch::async, [&] { server.stop(); }));
  }
  for (auto& stop : stops) stop.get();
  done.get();
  server.run();  // stopped: returns
  EXPECT_THROW(server.start(), std::runtime_error);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TB_SANITIZED
#endif
#endif
#else
#define TB_SANITIZED
#endif

#ifndef TB_SANITIZED  // whose memory grows by itself
TEST_F(ActorPoolTest, MemoryIsFlatOverAMillionSteps) {
  const auto resident_bytes = [] {
    size_t total, resident;
    std::ifstream("/proc/self/statm") >> total >> resident;
    return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  };
  EnvServer server(counting(8), server_options(unix_address()));
  server.start();
  Session run(pool_options({server.address(), server.address()}, 20), 1, 16);
  size_t early = 0;
  while (run.pool().count() < 1'000'000) {
    run.rollouts();
    if (early == 0 && run.pool().count() > 100'000) early = resident_bytes();
  }
  EXPECT_LT(resident_bytes(), early + (4 << 20));
  EXPECT_GT(early, 0u);
}
#endif

TEST_F(ActorPoolTest, CloseAtAnyMoment) {
  const char* scale = std::getenv("TB_STRESS_SCALE");
  const int repeats =
      scale ? std::max(5, static_cast<int>(1000 * std::atof(scale))) : 1000;
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  for (int i = 0; i < repeats; ++i) {
    Session run(pool_options({server.address(), server.address()}, 2));
    // From before the first connection to the middle of things.
    for (int k = 0; k < i % 5; ++k) run.rollouts();
    if (i % 3 == 0) run.batcher().close();
    if (i % 3 == 1) run.queue().close();
    run.end();
  }
}

}  // namespace
}  // namespace torchbeast
