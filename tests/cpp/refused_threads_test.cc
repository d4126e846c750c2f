// The system refuses threads: what needs one says so, and can be used later.

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "actor_pool.h"
#include "client.h"
#include "join_fixture.h"
#include "session.h"

#ifdef __linux__
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>

namespace torchbeast {
namespace {

// Refuses threads and processes to the calling thread alone, for good.
bool refuse_threads() {
  constexpr uint16_t kEqual = BPF_JMP | BPF_JEQ | BPF_K, kReturn = BPF_RET | BPF_K;
  sock_filter code[] = {
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
      {kEqual, 1, 0, __NR_clone},
      {kEqual, 0, 1, __NR_clone3},
      {kReturn, 0, 0, SECCOMP_RET_ERRNO | EAGAIN},
      {kReturn, 0, 0, SECCOMP_RET_ALLOW},
  };
  const sock_fprog program{sizeof(code) / sizeof(code[0]), code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

class RefusedThreadsTest : public JoinTest {
 protected:
  // What f throws in a thread that gets no others.
  template <typename F>
  static std::string error_without_threads(F&& f) {
    std::string error = "this system has no seccomp";
    std::thread([&] {
      if (refuse_threads()) error = error_of<std::runtime_error>(f);
    }).join();
    return error;
  }
};

const char kRefused[] = "the system refuses a thread: ";

#define SKIP_WITHOUT_SECCOMP(error) \
  if (error == "this system has no seccomp") GTEST_SKIP() << error

TEST_F(RefusedThreadsTest, AServerCanBeStartedLater) {
  EnvServer server(counting(1), server_options(unix_address()));
  const std::string error = error_without_threads([&] { server.start(); });
  SKIP_WITHOUT_SECCOMP(error);
  EXPECT_TRUE(contains(error, kRefused));
  EXPECT_TRUE(contains(error, "ulimit -u"));
  server.start();
  ActorPool::probe(unix_address(), {}, Milliseconds(10'000));
  server.stop();
}

TEST_F(RefusedThreadsTest, AServerThatHasNotStartedEnds) {
  {
    EnvServer server(counting(1), server_options(unix_address()));
    const std::string error = error_without_threads([&] { server.start(); });
    SKIP_WITHOUT_SECCOMP(error);
    server.stop();
  }
  EnvServer second(counting(1), server_options(unix_address()));
  second.start();
}

TEST_F(RefusedThreadsTest, AClientCanRunLater) {
  EnvClientOptions options = client_options(unix_address());
  options.maximum_downtime = Milliseconds(0);
  EnvClient client(counting(1), options);
  const std::string error = error_without_threads([&] { client.run(); });
  SKIP_WITHOUT_SECCOMP(error);
  EXPECT_TRUE(contains(error, kRefused));
  EXPECT_TRUE(contains(error_without_threads([&] { client.run_here(); }), kRefused));
  EXPECT_TRUE(contains(error_of<TransportError>([&] { client.run(); }), "no learner"));
}

TEST_F(RefusedThreadsTest, APoolEndsAndClosesItsQueues) {
  EnvServer server(counting(1), server_options(unix_address()));
  server.start();
  const auto queue = std::make_shared<BatchingQueue>(batch_sizes(1, 1));
  const auto batcher = std::make_shared<DynamicBatcher>(batch_sizes(1, 1));
  ActorPool pool(SessionTest::pool_options({unix_address()}), queue, batcher,
                 CountingAgent::initial_state());
  const std::string error = error_without_threads([&] { pool.run(); });
  SKIP_WITHOUT_SECCOMP(error);
  EXPECT_TRUE(contains(error, kRefused));
  EXPECT_TRUE(queue->is_closed());
  EXPECT_TRUE(batcher->is_closed());
}

TEST_F(RefusedThreadsTest, AProbeSaysSo) {
  EnvServer server(counting(1), server_options(unix_address()));
  server.start();
  const auto probe = [&] {
    return ActorPool::probe(unix_address(), {}, Milliseconds(10'000));
  };
  probe();
  const std::string error = error_without_threads(probe);
  SKIP_WITHOUT_SECCOMP(error);
  EXPECT_TRUE(contains(error, kRefused));
  probe();
}

}  // namespace
}  // namespace torchbeast
#endif
