// EnvServer::stop() with environments that hang, or that call it themselves.

#include "server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <utility>
#include <vector>

#include "counting_environment.h"
#include "session.h"
#include "test_util.h"

namespace torchbeast {
namespace {

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

class ServerTest : public GuardedTest {
 protected:
  std::unique_ptr<EnvServer> serve(std::function<void()> in_step) {
    StreamServerOptions options;
    options.address = "unix:" + temporary_directory() + "/server";
    auto server = std::make_unique<EnvServer>(
        [this, in_step] { return std::make_unique<Interrupted>(in_step, gone_); },
        options);
    server->start();
    return server;
  }

  static ActorPoolOptions pool_options(const EnvServer& server) {
    ActorPoolOptions options;
    options.unroll_length = 5;
    options.addresses = {server.address()};
    return options;
  }

  const std::shared_ptr<std::promise<void>> gone_ =
      std::make_shared<std::promise<void>>();
};

TEST_F(ServerTest, AnEnvironmentThatHangsIsLeftBehind) {
  std::promise<void> inside, go_on;
  auto server = serve([&] {
    inside.set_value();
    go_on.get_future().wait();
  });
  Session run(pool_options(*server));
  inside.get_future().wait();
  testing::internal::CaptureStderr();
  const auto start = Clock::now();
  server->stop(Milliseconds(50));
  server->stop(kNever);  // the first limit counts
  server->run();
  server.reset();
  EXPECT_LT(Clock::now() - start, Milliseconds(20'000));
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("step() for the learner at unix:"), std::string::npos) << text;
  go_on.set_value();
  gone_->get_future().wait();
}

TEST_F(ServerTest, AnEnvironmentMayStopItsServer) {
  EnvServer* pointer = nullptr;
  std::promise<void> ready;
  auto server = serve([&] {
    ready.get_future().wait();
    pointer->stop(kNever);
  });
  pointer = server.get();
  ready.set_value();
  Session run(pool_options(*server));
  server->run();
  gone_->get_future().wait();
  server->stop();
}

TEST_F(ServerTest, AnEnvironmentMayDestroyItsServer) {
  std::unique_ptr<EnvServer> server;
  std::promise<void> ready;
  server = serve([&] {
    ready.get_future().wait();
    server.reset();
  });
  Session run(pool_options(*server));
  ready.set_value();
  gone_->get_future().wait();
}

}  // namespace
}  // namespace torchbeast
