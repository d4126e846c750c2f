// ActorPool and EnvServer together, over real sockets in one process: rollouts, memory
// and ends. actor_pool_faults_test.cc has servers and environments that fail.

#include "actor_pool.h"

#include "server.h"
#include "session.h"

namespace torchbeast {
namespace {

class ActorPoolTest : public SessionTest {};

TEST_F(ActorPoolTest, RolloutsAreWhatHappened) {
  EnvServer local(counting(3), server_options(unix_address()));
  EnvServer remote(counting(3), server_options("127.0.0.1:0"));
  local.start();
  remote.start();
  Session run(pool_options({local.address(), remote.address(), local.address()}));
  Checker checker(5, true);
  while (checker.num_rollouts < 60 || checker.num_environments() < 9) {
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

// Memory

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

#ifndef TB_SANITIZED  // whose memory grows by itself
TEST_F(ActorPoolTest, MemoryIsFlatOverAMillionSteps) {
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

// Ends

// Over shared memory and TCP; those that have joined are in join_test.cc.
TEST_F(ActorPoolTest, AFailureOutlivesTheCloseBehindIt) {
  for (const std::string& address : {unix_address(), std::string("127.0.0.1:0")}) {
    EnvServer server(counting(2), server_options(address));
    server.start();
    const ActorPoolOptions options = pool_options({server.address(), server.address()});
    const int repeats = scaled(50, 5);
    for (int i = 0; i < repeats; ++i) ASSERT_TRUE(ends_with_failure(options)) << i;
    EXPECT_TRUE(ends_with_failure(options, true));
  }
}

TEST_F(ActorPoolTest, ACloseWhileNothingIsThereIsQuick) {
  Session run(pool_options({unix_address("nobody")}));
  run.end();
}

TEST_F(ActorPoolTest, CloseAtAnyMoment) {
  const int repeats = scaled(1000, 5);
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
