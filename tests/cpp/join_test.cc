// Environments that dial the learner: Listener, ActorPool and EnvClient together, and
// how each of them ends.

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <sys/socket.h>

#include "join_fixture.h"
#include "server.h"

namespace torchbeast {
namespace {

TEST_F(JoinTest, DiallingAndListeningGoTogether) {
  auto listener = listen(4, "127.0.0.1:0");
  EnvServer server(counting(2), server_options(unix_address("server")));
  server.start();
  ActorPoolOptions options = pool_options(listener);
  options.addresses = {server.address()};
  Session run(options);
  RunningClient client(counting(2), client_options(listener->address()));
  Checker checker(kT, true);
  while (checker.num_environments() < 4) {
    ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  }
}

TEST_F(JoinTest, AListenerServesOnePoolAtATime) {
  auto listener = listen();
  RunningClient client(counting(2), client_options(unix_address()));
  {
    Session first(pool_options(listener));
    first.rollouts();
    Session second(pool_options(listener));
    EXPECT_TRUE(contains(error_of<std::invalid_argument>([&] { second.wait(); }),
                         "has a pool already"));
    first.rollouts();
  }
  Session third(pool_options(listener));  // the client has waited for it
  third.rollouts();
}

TEST_F(JoinTest, ItListensToOtherMachinesWithSecurityOnly) {
  ListenerOptions options;
  options.address = "0.0.0.0:0";
  EXPECT_THROW(Listener{options}, std::invalid_argument);
}

// Ends

// Over shared memory, the socket alone and TCP.
TEST_F(JoinTest, AFailureOutlivesTheCloseBehindIt) {
  for (const std::string address : {"", "127.0.0.1:0"}) {
    auto listener = listen(4, address);
    EnvClientOptions options = client_options(listener->address());
    const RunningClient first(counting(2), options);
    options.offers_memory = false;
    const RunningClient second(counting(2), options);
    const int repeats = scaled(10, 2);
    for (int i = 0; i < repeats; ++i) {
      ASSERT_TRUE(ends_with_failure(pool_options(listener))) << i;
    }
    EXPECT_TRUE(ends_with_failure(pool_options(listener), true));
  }
}

// A learner that hangs then.
TEST_F(JoinTest, WhoLeavesDoesNotWaitForever) {
  std::promise<void> release;
  StreamService learner(
      [&](grpc::ServerContext*, ServedStream* stream) {
        grpc::ByteBuffer message;
        wire::AgentMessage hello;
        hello.mutable_hello()->set_version(kWireVersion);
        stream->Write(encode(hello));
        stream->Read(&message);  // its hello
        const Array action = pool().allocate({DType::kInt64, {1}});
        *action.as<int64_t>() = 1;
        for (uint64_t number = 1; number <= 2 && stream->Read(&message); ++number) {
          stream->Write(encode_action({action}, number, pool()));
        }
        release.get_future().wait();
        return grpc::Status::OK;
      },
      kJoinMethod);
  grpc::ServerBuilder builder;
  builder.AddListeningPort(unix_address(), grpc::InsecureServerCredentials());
  builder.RegisterService(&learner);
  const auto server = builder.BuildAndStart();
  EnvClientOptions options = client_options(unix_address());
  options.hello_timeout = Milliseconds(300);
  auto client = std::make_unique<RunningClient>(counting(1), options, 1);
  wait_until([&] { return client->client().stats().num_episodes == 1; });
  std::promise<void> left;
  Threads threads;
  threads.start([&] {
    client->wait();
    left.set_value();
  });
  EXPECT_EQ(left.get_future().wait_for(std::chrono::seconds(10)),
            std::future_status::ready);
  release.set_value();
  threads.join();
  server->Shutdown(std::chrono::system_clock::now());
}

// Over shared memory, the socket alone and TCP; one joins between the two ends.
TEST_F(JoinTest, ACompleteRunEndsItsEnvironments) {
  for (const std::string address : {"", "127.0.0.1:0"}) {
    auto listener = listen(4, address);
    EnvClientOptions options = client_options(listener->address());
    RunningClient first(counting(3), options);
    listener->probe(Milliseconds(60'000));
    options.offers_memory = false;
    RunningClient second(counting(3), options);
    wait_until([&] { return listener->stats().num_streams == 2; });
    Session run(pool_options(listener));
    for (int i = 0; i < 5; ++i) run.rollouts();
    listener->finish();
    run.end();
    RunningClient late(counting(3), options);
    for (RunningClient* client : {&first, &second, &late}) {
      EXPECT_NO_THROW(client->wait());
      EXPECT_TRUE(client->client().stats().finished);
      EXPECT_EQ(client->client().stats().last_error, "") << "it heard that at once";
    }
    EXPECT_EQ(run.pool().stats().num_dropped_steps, 0u);
    for (EventLog* events : {&run.pool().events(), &listener->events()}) {
      EXPECT_TRUE(events->take().first.empty());
    }
  }
}

TEST_F(JoinTest, WithoutALearnerAClientEnds) {
  EnvClientOptions options = client_options(unix_address());
  options.maximum_downtime = Milliseconds(300);
  EnvClient client(counting(2), options);
  EXPECT_TRUE(contains(error_of<TransportError>([&] { client.run(); }),
                       "no learner for 0.3 s"));
  EXPECT_THROW(client.run(), std::runtime_error) << "once only";
  EnvClient broken(
      []() -> std::unique_ptr<Environment> {
        throw std::runtime_error("no such game");
      },
      options);
  EXPECT_TRUE(
      contains(error_of<std::runtime_error>([&] { broken.run(); }), "no such game"));
}

TEST_F(JoinTest, ASilentLearnerCountsAsNone) {
  const int silent = bound_socket(path("socket"));
  ASSERT_EQ(::listen(silent, 8), 0);
  EnvClientOptions options = client_options(unix_address());
  options.maximum_downtime = Milliseconds(400);
  options.hello_timeout = Milliseconds(300);
  EnvClient client(counting(2), options);
  EXPECT_TRUE(contains(error_of<TransportError>([&] { client.run(); }),
                       "has not answered in time"));
  close(silent);
  unlink(path("socket").c_str());
}

struct Unwanted : std::exception {};

TEST_F(JoinTest, StopWakesAClientThatWaits) {
  EnvClientOptions options = client_options(unix_address());
  options.maximum_downtime = kNever;
  {  // for a learner
    RunningClient client(counting(2), options);
    wait_until([&] { return !client.client().stats().last_error.empty(); });
    client.client().stop();
    client.wait();
  }
  auto listener = listen();
  RunningClient client(counting(2), options);  // for an action
  listener->probe(Milliseconds(60'000));
  client.client().stop();
  client.client().stop();
  client.wait();
  EnvClient stopped([]() -> std::unique_ptr<Environment> { throw Unwanted(); },
                    options);
  stopped.stop(Milliseconds(0));
  testing::internal::CaptureStderr();
  stopped.run();
  stopped.run_here();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(JoinTest, CloseAtAnyMoment) {
  const int repeats = scaled(200, 10);
  for (int i = 0; i < repeats; ++i) {
    auto listener = listen(3);
    RunningClient a(counting(2), client_options(unix_address()));
    RunningClient b(counting(2), client_options(unix_address()));
    Session run(pool_options(listener));
    for (int k = 0; k < i % 5; ++k) run.rollouts();
    switch (i % 6) {
      case 0:
        run.batcher().close();
        break;
      case 1:
        run.queue().close();
        break;
      case 2:
        listener->close();
        break;
      case 3:
        a.client().stop();
        break;
      case 4:
        b.client().stop();
        listener->close();
        break;
      default:
        break;
    }
    run.end();
  }
}

}  // namespace
}  // namespace torchbeast
