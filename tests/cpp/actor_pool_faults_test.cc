// ActorPool with servers that are missing, silent, break or lie, and with environments
// that raise: which of them a run survives, and which end it.

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <future>
#include <limits>

#include "actor_pool.h"
#include "messages.h"
#include "server.h"
#include "session.h"

namespace torchbeast {
namespace {

class ActorPoolFaultsTest : public SessionTest {};

// A server that runs this for each stream.
class HandMadeServer {
 public:
  HandMadeServer(const std::string& address, StreamService::Handler handler)
      : service_(std::move(handler)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
  }
  ~HandMadeServer() { server_->Shutdown(std::chrono::system_clock::now()); }

 private:
  StreamService service_;
  std::unique_ptr<grpc::Server> server_;
};

// Answers the learner's hello with that of two environments, and with their first step.
void begin_stream(ServedStream* stream) {
  CountingEnvironment environment(0, 2);
  grpc::ByteBuffer message;
  stream->Read(&message);
  wire::EnvMessage hello;
  *hello.mutable_hello() = environment.hello();
  stream->Write(encode(hello));
  stream->Write(encode_step(environment.reset(), pool()));
}

// Environments that raise

TEST_F(ActorPoolFaultsTest, AFactorysErrorReachesTheRun) {
  EnvServer server(
      []() -> std::unique_ptr<Environment> {
        throw std::runtime_error("no such game");
      },
      server_options(unix_address()));
  server.start();
  ActorPoolOptions options = pool_options({server.address()});
  options.check = [&, end = end_after_failures(2)](const PoolFacts& facts) {
    for (const auto& peer : facts.peers) EXPECT_EQ(peer.first, server.address());
    end(facts);
  };
  Session run(options);
  const std::string error = error_of<EnvironmentError>([&] { run.wait(); });
  EXPECT_NE(error.find("no such game"), std::string::npos) << error;
  EXPECT_EQ(run.pool().stats().num_env_failures, 3u);
}

TEST_F(ActorPoolFaultsTest, AnEnvironmentThatRaisesCostsItsStream) {
  // Numbers from 5 on: the other server has 0.
  std::atomic<int64_t> number{5};
  EnvServer bad([&] { return std::make_unique<FailingEnvironment>(number++, 2, 12); },
                server_options(unix_address("bad")));
  EnvServer good(counting(2), server_options(unix_address("good")));
  bad.start();
  good.start();
  Session run(pool_options({bad.address(), good.address()}));
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

// Servers that are missing, or silent

TEST_F(ActorPoolFaultsTest, NobodyThereEndsTheRun) {
  ActorPoolOptions options = pool_options({unix_address("nobody")});
  options.check = end_without_streams(Milliseconds(300));
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_NE(error.find("nobody"), std::string::npos) << error;
}

TEST_F(ActorPoolFaultsTest, ASilentPeerEndsTheRun) {
  const int listener = bound_socket(path("silent"));
  ASSERT_EQ(listen(listener, 8), 0);
  ActorPoolOptions options = pool_options({unix_address("silent")});
  options.step_timeout = Milliseconds(300);
  options.check = end_without_streams(Milliseconds(500));
  {
    Session run(options);
    const std::string error = error_of<TransportError>([&] { run.wait(); });
    EXPECT_NE(error.find("has not answered within the step timeout"), std::string::npos)
        << error;
  }
  close(listener);
  unlink(path("silent").c_str());
}

TEST_F(ActorPoolFaultsTest, AHostThatDropsPacketsIsNotThere) {
  // A full backlog: further connections wait for their timeout, of about 20 s.
  const int full = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* const place = reinterpret_cast<sockaddr*>(&name);
  socklen_t size = sizeof(name);
  ASSERT_EQ(bind(full, place, size), 0);
  ASSERT_EQ(listen(full, 0), 0);
  ASSERT_EQ(getsockname(full, place, &size), 0);
  std::vector<int> waiting;
  for (int i = 0; i < 8; ++i) {
    waiting.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    connect(waiting.back(), place, size);
  }
  const std::string dropping = "127.0.0.1:" + std::to_string(ntohs(name.sin_port));
  EnvServer good(counting(2), server_options(unix_address()));
  good.start();
  ActorPoolOptions options = pool_options({dropping, good.address()});
  options.check = end_without_streams(Milliseconds(1'000));
  {
    Session run(options);
    run.rollouts();
    Threads drain;
    drain.start([&] {
      while (run.queue().dequeue()) {
      }
    });
    good.stop();
    const auto begin = Clock::now();
    const std::string error = error_of<TransportError>([&] { run.wait(); });
    EXPECT_LT(Clock::now() - begin, Milliseconds(15'000));
    EXPECT_NE(error.find("no stream"), std::string::npos) << error;
    run.queue().close();
  }
  for (const int one : waiting) close(one);
  close(full);
}

TEST_F(ActorPoolFaultsTest, AStuckEnvironmentCountsAsLost) {
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

TEST_F(ActorPoolFaultsTest, AServerThatAlwaysHangsCostsItsStream) {
  // Sends one step, then nothing.
  const HandMadeServer hanging(unix_address("x"),
                               [](grpc::ServerContext*, ServedStream* stream) {
                                 begin_stream(stream);
                                 grpc::ByteBuffer message;
                                 while (stream->Read(&message)) {
                                 }
                                 return grpc::Status::OK;
                               });
  EnvServer good(counting(2), server_options(unix_address()));
  good.start();
  ActorPoolOptions options = pool_options({unix_address("x"), good.address()});
  options.step_timeout = Milliseconds(300);
  options.check = end_without_streams(Milliseconds(700));
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
  EXPECT_NE(error.find("no stream"), std::string::npos) << error;
  EXPECT_NE(error.find("step timeout"), std::string::npos) << error;
}

// As if a thread held Python's lock for more than two seconds at a time.
TEST_F(ActorPoolFaultsTest, LimitsDoNotWaitForASlowCheck) {
  const HandMadeServer hanging(unix_address(),
                               [](grpc::ServerContext*, ServedStream* stream) {
                                 begin_stream(stream);
                                 grpc::ByteBuffer message;
                                 while (stream->Read(&message)) {
                                 }
                                 return grpc::Status::OK;
                               });
  std::promise<void> release;
  ActorPoolOptions options = pool_options({unix_address()});
  options.step_timeout = Milliseconds(300);
  options.check = [released = release.get_future().share()](const PoolFacts&) {
    released.wait_for(Milliseconds(2'300));
  };
  Session run(options);
  const auto deadline = time_after(Milliseconds(10'000));
  while (run.pool().stats().last_error.empty() && Clock::now() < deadline) {
    std::this_thread::sleep_for(Milliseconds(10));
  }
  EXPECT_NE(run.pool().stats().last_error.find("step timeout"), std::string::npos);
  release.set_value();
  run.end();
}

// Servers that break

TEST_F(ActorPoolFaultsTest, AServerThatComesBackIsFound) {
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

TEST_F(ActorPoolFaultsTest, AServerThatAlwaysBreaksEndsTheRun) {
  // Ends each stream after some steps, as a crashing process does.
  const HandMadeServer crashing(
      unix_address("x"), [](grpc::ServerContext*, ServedStream* stream) {
        begin_stream(stream);
        grpc::ByteBuffer message;
        stream->Read(&message);
        return grpc::Status(grpc::StatusCode::UNAVAILABLE, "crashed");
      });
  ActorPoolOptions options = pool_options({unix_address("x")});
  options.check = end_without_streams(Milliseconds(1'000));
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_NE(error.find("no stream"), std::string::npos) << error;
  EXPECT_NE(error.find("crashed"), std::string::npos) << error;
}

// Servers that differ, or lie

// How many events of a kind the pool has noted since the last time.
int64_t count_events(ActorPool& pool, Event::Kind kind) {
  const std::vector<Event> events = pool.events().take().first;
  return std::count_if(events.begin(), events.end(),
                       [kind](const Event& event) { return event.kind == kind; });
}

TEST_F(ActorPoolFaultsTest, DifferentEnvironmentsAreRefused) {
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
    EXPECT_NE(error.find("b differs from the first environment"), std::string::npos)
        << error;
    EXPECT_NE(error.find("num_envs: 2 -> 3"), std::string::npos) << error;
    EXPECT_EQ(count_events(run.pool(), Event::kRefused), 1);
  }
  // If that is so of all, the check knows at once.
  options.addresses = {b.address(), b.address()};
  options.check = end_if_all_refuse;
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_NE(error.find("differ"), std::string::npos) << error;
}

TEST_F(ActorPoolFaultsTest, StreamsThatDoNotFitAreRefused) {
  EnvServer server(counting(3), server_options(unix_address()));
  server.start();
  ActorPoolOptions options = pool_options({server.address()});
  options.check = end_if_all_refuse;
  Session run(options, 1, 2);
  EXPECT_TRUE(contains(error_of<TransportError>([&] { run.wait(); }),
                       server.address() +
                           ": 3 environments in a stream, and the learner's batches "
                           "have at most 2"));
  auto queue = std::make_shared<BatchingQueue>(batch_sizes(1, 3));
  auto batcher = std::make_shared<DynamicBatcher>(batch_sizes(1, 3));
  ActorPool pool(options, queue, batcher, make_array({1, 2, 1}, {0, 0}));
  EXPECT_TRUE(contains(error_of<TransportError>([&] { pool.run(); }),
                       "the initial agent state has [1, 2, 1]"));
}

TEST_F(ActorPoolFaultsTest, AHelloThatBreaksARuleIsNotTheMeasure) {
  const HandMadeServer bad(
      unix_address("bad"), [](grpc::ServerContext*, ServedStream* stream) {
        grpc::ByteBuffer message;
        stream->Read(&message);
        wire::EnvMessage hello;
        *hello.mutable_hello() = CountingEnvironment(0, 2).hello();
        hello.mutable_hello()->set_environment(std::string(2000, 'x'));
        stream->Write(encode(hello));
        return grpc::Status::OK;
      });
  EnvServer good(counting(2), server_options(unix_address("good")));
  Session run(pool_options({unix_address("bad"), good.address()}));
  while (run.pool().stats().num_refused == 0) std::this_thread::yield();
  good.start();
  run.rollouts();
}

TEST_F(ActorPoolFaultsTest, AWrongTokenEndsTheRunAtOnce) {
  StreamServerOptions options = server_options(unix_address());
  options.security.token = "a-secret";
  EnvServer server(counting(1), options);
  server.start();
  ActorPoolOptions pool = pool_options({server.address()});
  pool.check = end_if_all_refuse;
  Session run(pool);
  EXPECT_THROW(run.wait(), TransportError);
  EXPECT_EQ(server.stats().num_refused, 1u);
}

// Runs against a server that sends `messages` to whoever says hello.
std::string error_against(const std::string& address,
                          const std::vector<grpc::ByteBuffer>& messages,
                          ActorPoolOptions options) {
  const HandMadeServer server(address, [&](grpc::ServerContext*, ServedStream* stream) {
    grpc::ByteBuffer message;
    stream->Read(&message);
    for (const grpc::ByteBuffer& m : messages) {
      grpc::ByteBuffer copied = m;
      stream->Write(copied);
      if (&m != &messages[0]) stream->Read(&message);
    }
    return grpc::Status::OK;
  });
  options.check = end_at_an_error;
  Session run(options);
  return error_of<std::exception>([&] { run.wait(); });
}

TEST_F(ActorPoolFaultsTest, LiesAreRefused) {
  MemoryPool& pool = torchbeast::pool();
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
  arrays[3] = pool.allocate({DType::kBool, {2}});  // done
  arrays[3].data()[0] = 1;
  arrays[3].data()[1] = 0;
  contains(
      against({encode(hello), encode_step({arrays, {arrays[0], arrays[1]}, 0}, pool)}),
      "truncated is true and done is false in environment 1");

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

}  // namespace
}  // namespace torchbeast
