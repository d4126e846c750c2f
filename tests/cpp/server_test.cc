// EnvServer: where it listens, whom it refuses, and stop() with environments that hang,
// or that call it themselves.

#include "server.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "counting_environment.h"
#include "messages.h"
#include "session.h"

namespace torchbeast {
namespace {

class ServerTest : public SessionTest {};

// Where it listens

TEST_F(ServerTest, SocketsArePrivateAndRemoved) {
  EnvServer server(counting(1), server_options(unix_address()));
  server.start();
  struct stat status;
  ASSERT_EQ(stat(path("socket").c_str(), &status), 0);
  EXPECT_TRUE(S_ISSOCK(status.st_mode));
  EXPECT_EQ(status.st_mode & 0777, 0600u);

  EnvServer second(counting(1), server_options(unix_address()));
  const std::string error = error_of<std::runtime_error>([&] { second.start(); });
  EXPECT_NE(error.find("another server listens there"), std::string::npos) << error;
  ASSERT_EQ(stat(path("socket").c_str(), &status), 0) << "the first server's socket";

  server.stop();
  EXPECT_NE(stat(path("socket").c_str(), &status), 0);
  server.stop();
}

TEST_F(ServerTest, PathsThatCannotBe) {
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

TEST_F(ServerTest, PortsThatAreTaken) {
  EnvServer server(counting(1), server_options("127.0.0.1:0"));
  server.start();
  EnvServer second(counting(1), server_options(server.address()));
  const std::string error = error_of<std::runtime_error>([&] { second.start(); });
  EXPECT_NE(error.find("in use"), std::string::npos) << error;
}

TEST_F(ServerTest, SocketsThatCannotBeMade) {
  EnvServer first(counting(1), server_options(unix_address("first")));
  first.start();  // gRPC has its descriptors
  const int lowest = dup(0);
  close(lowest);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{static_cast<rlim_t>(lowest), limit.rlim_max};
  for (const std::string& address : {unix_address(), std::string("127.0.0.1:0")}) {
    EnvServer server(counting(1), server_options(address));
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    const std::string error = error_of<std::runtime_error>([&] { server.start(); });
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_NE(error.find("Too many open files"), std::string::npos) << error;
  }
}

// Whom it refuses

TEST_F(ServerTest, TokensAreChecked) {
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

TEST_F(ServerTest, TokensThatCannotTravelAreRefused) {
  StreamServerOptions options = server_options(unix_address());
  options.security.token = "a secret";
  EXPECT_THROW(EnvServer(counting(1), options), std::invalid_argument);
  Security security;
  security.token = "two\nlines";
  EXPECT_THROW(ActorPool::probe(unix_address(), security, Milliseconds(10'000)),
               std::invalid_argument);
}

TEST_F(ServerTest, StreamsAreLimited) {
  StreamServerOptions options = server_options(unix_address());
  options.max_streams = 1;
  EnvServer server(counting(1), options);
  server.start();
  Session run(pool_options({server.address()}));
  run.rollouts();
  const std::string error = error_of<TransportError>(
      [&] { ActorPool::probe(server.address(), {}, Milliseconds(10'000)); });
  EXPECT_NE(error.find("too many streams at once"), std::string::npos) << error;
}

TEST_F(ServerTest, SilentLearnersAreCut) {
  StreamServerOptions options = server_options(unix_address());
  options.hello_timeout = Milliseconds(300);
  EnvServer server(counting(1), options);
  server.start();
  auto channel =
      grpc::CreateCustomChannel(unix_address(), grpc::InsecureChannelCredentials(),
                                channel_arguments(Address(unix_address())));
  grpc::ClientContext context;
  const auto stream = open_stream(channel.get(), &context);
  grpc::ByteBuffer message;
  EXPECT_FALSE(stream->Read(&message));
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(ServerTest, LearnersThatLieAreRefused) {
  EnvServer server(counting(2), server_options(unix_address()));
  server.start();
  MemoryPool pool;
  const auto status_after = [&](const std::vector<grpc::ByteBuffer>& messages) {
    auto channel =
        grpc::CreateCustomChannel(unix_address(), grpc::InsecureChannelCredentials(),
                                  channel_arguments(Address(unix_address())));
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
  EXPECT_EQ(status_after({encode_action({narrow}, 1, pool)}).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status_after({encode(hello), encode_action({wide}, 1, pool)}).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status_after({encode(hello), encode_action({narrow, narrow}, 1, pool)})
                .error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status_after({encode(hello), encode_action({}, 1, pool)}).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  hello.mutable_hello()->set_version(1);
  const grpc::Status status = status_after({encode(hello)});
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_NE(status.error_message().find("speaks version 1 of the protocol"),
            std::string::npos);
}

// stop()

TEST_F(ServerTest, StoppingEndsRunAndMayBeRepeated) {
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

TEST_F(ServerTest, StoppingBeforeRunEndsTheStreams) {
  EnvServer server(counting(1), server_options(unix_address()));
  server.start(true);
  Session run(pool_options({unix_address()}));
  while (server.stats().num_streams == 0) std::this_thread::yield();
  testing::internal::CaptureStderr();
  server.stop();
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  server.run();  // stopped: returns
}

TEST_F(ServerTest, OneThreadRunsIt) {
  EnvServer server(counting(1), server_options(unix_address()));
  server.start(true);
  auto done = std::async(std::launch::async, [&] { server.run(); });
  Session run(pool_options({unix_address()}));
  run.rollouts();
  const std::string error = error_of<std::runtime_error>([&] { server.run(); });
  EXPECT_NE(error.find("runs already"), std::string::npos) << error;
  run.rollouts();
  server.stop();
  done.get();
}

TEST_F(ServerTest, AFailedStartIsNoStart) {
  EnvServer first(counting(1), server_options(unix_address()));
  first.start();
  EnvServer second(counting(1), server_options(unix_address()));
  EXPECT_THROW(second.start(true), std::runtime_error);
  const std::string error = error_of<std::runtime_error>([&] { second.run(); });
  EXPECT_NE(error.find("another server listens there"), std::string::npos) << error;
}

// Calls `in_step` in its third step.
class Interrupted : public CountingEnvironment {
 public:
  using Result = decltype(std::declval<Environment&>().reset());

  Interrupted(std::function<void()> in_step, std::shared_ptr<std::promise<void>> gone)
      : CountingEnvironment(0, 2, true),
        in_step_(std::move(in_step)),
        gone_(std::move(gone)) {}
  ~Interrupted() override { gone_->set_value(); }

  Result step(const std::vector<Array>& action) override {
    if (++num_steps_ == 3) in_step_();
    return CountingEnvironment::step(action);
  }

 private:
  const std::function<void()> in_step_;
  const std::shared_ptr<std::promise<void>> gone_;
  int num_steps_ = 0;
};

class ServerStopTest : public SessionTest {
 protected:
  std::unique_ptr<EnvServer> serve(std::function<void()> in_step) {
    auto server = std::make_unique<EnvServer>(
        [this, in_step] { return std::make_unique<Interrupted>(in_step, gone_); },
        server_options(unix_address()));
    server->start();
    return server;
  }

  const std::shared_ptr<std::promise<void>> gone_ =
      std::make_shared<std::promise<void>>();
};

TEST_F(ServerStopTest, AnEnvironmentThatHangsIsLeftBehind) {
  std::promise<void> inside, go_on;
  auto server = serve([&] {
    inside.set_value();
    go_on.get_future().wait();
  });
  Session run(pool_options({server->address()}));
  inside.get_future().wait();
  testing::internal::CaptureStderr();
  const auto start = Clock::now();
  server->stop(Milliseconds(50));
  server->stop(kNever);  // the first limit counts
  server->run();
  server.reset();
  EXPECT_LT(Clock::now() - start, Milliseconds(20'000));
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("step() for the learner that has connected from this machine"),
            std::string::npos)
      << text;
  go_on.set_value();
  gone_->get_future().wait();
}

TEST_F(ServerStopTest, RunWaitsForTheStreamsBesidesItsOwn) {
  std::promise<void> inside, stopping;
  std::atomic<bool> has_left{false};
  std::thread::id host;
  const auto in_step = [&] {
    if (std::this_thread::get_id() == host) return;
    inside.set_value();
    stopping.get_future().wait();
    std::this_thread::sleep_for(Milliseconds(300));
    has_left = true;
  };
  EnvServer server(
      [&] {
        return std::make_unique<Interrupted>(in_step,
                                             std::make_shared<std::promise<void>>());
      },
      server_options(unix_address()));
  server.start(true);
  auto done = std::async(std::launch::async, [&] {
    host = std::this_thread::get_id();
    server.run();
    EXPECT_TRUE(has_left);
  });
  Session run(pool_options({server.address(), server.address()}));
  inside.get_future().wait();
  auto stop = std::async(std::launch::async, [&] { server.stop(kNever); });
  stopping.set_value();
  done.get();
}

TEST_F(ServerStopTest, AStreamThatComesAfterStopGetsNoEnvironment) {
  EnvServer* pointer = nullptr;
  std::promise<void> ready;
  std::string error;
  auto server = serve([&] {
    ready.get_future().wait();
    pointer->stop(kNever);
    // For a moment the server still listens.
    error = error_of<TransportError>(
        [&] { ActorPool::probe(unix_address(), {}, Milliseconds(10'000)); });
  });
  pointer = server.get();
  ready.set_value();
  Session run(pool_options({server->address()}));
  server->run();
  gone_->get_future().wait();
  EXPECT_NE(error, "nothing");
}

TEST_F(ServerStopTest, AnEnvironmentMayDestroyItsServer) {
  std::unique_ptr<EnvServer> server;
  std::promise<void> ready;
  server = serve([&] {
    ready.get_future().wait();
    server.reset();
  });
  Session run(pool_options({server->address()}));
  ready.set_value();
  gone_->get_future().wait();
}

}  // namespace
}  // namespace torchbeast
