// Sockets at which servers listen: one server at a time has the path of a unix socket.

#include "sockets.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "session.h"
#include "test_util.h"

namespace torchbeast {
namespace {

class SocketsTest : public SessionTest {
 protected:
  bool is_there(const std::string& name) const {
    struct stat status;
    return lstat(path(name).c_str(), &status) == 0;
  }
};

TEST_F(SocketsTest, OfTwoThatStartAtOnceOneListens) {
  const Address address(unix_address());
  for (int round = scaled(2000, 200); round > 0; --round) {
    std::atomic<int> num_ready{0}, num_done{0}, num_listening{0};
    const auto try_to_listen = [&] {
      std::optional<ListeningSocket> socket;
      ++num_ready;
      while (num_ready < 2) std::this_thread::yield();
      const std::string error =
          error_of<std::runtime_error>([&] { socket.emplace(address); });
      if (socket) {
        ++num_listening;
        close(dial_unix(address, false));
      } else {
        EXPECT_TRUE(contains(error, "another server listens there"));
      }
      ++num_done;
      while (num_done < 2) std::this_thread::yield();
    };
    Threads threads;
    threads.start(try_to_listen);
    threads.start(try_to_listen);
    threads.join();
    ASSERT_EQ(num_listening, 1);
  }
  EXPECT_FALSE(is_there("socket"));
  EXPECT_FALSE(is_there("socket.lock"));
}

TEST_F(SocketsTest, WhatADeadServerHasLeftIsReplaced) {
  close(bound_socket(path("socket")));
  std::ofstream(path("socket.lock")) << "";
  {
    const ListeningSocket socket{Address(unix_address())};
    close(dial_unix(Address(unix_address()), false));
  }
  EXPECT_FALSE(is_there("socket"));
  EXPECT_FALSE(is_there("socket.lock"));
}

bool is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST_F(SocketsTest, AForkHasNoneOfThem) {
  const Address address(unix_address());
  ListeningSocket socket(address);
  std::vector<Descriptor> files;
  std::vector<int> given_away;  // as to gRPC
  for (int i = 0; i < 100; ++i) {
    files.emplace_back(open("/dev/null", O_RDONLY));
    given_away.push_back(dial_unix(address, false));
    given_away.push_back(socket.accept(Milliseconds(10'000)));
  }
  // Another file has the number of one that was closed.
  const int another = given_away.back();
  given_away.pop_back();
  close(another);
  ASSERT_EQ(open("/dev/null", O_RDONLY), another);
  const pid_t child = fork();
  if (child == 0) {
    int num_open = !is_open(another);
    for (const int fd : given_away) num_open += is_open(fd);
    for (const Descriptor& file : files) num_open += is_open(file.get());
    // An owner does not close what the fork has opened.
    const int number = files.front().get();
    num_open += dup2(another, number) != number;
    files.clear();
    _exit(num_open + !is_open(number));
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  for (const int fd : given_away) EXPECT_EQ(close(fd), 0);
  close(another);
  for (const Descriptor& file : files) EXPECT_TRUE(is_open(file.get()));
}

int num_tcp_sockets() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr name{};
    socklen_t size = sizeof(name);
    count += getsockname(fd, &name, &size) == 0 && name.sa_family != AF_UNIX;
  }
  return count;
}

TEST_F(SocketsTest, AForkHasNoConnectionOfGrpc) {
  EnvServer server(counting(1), server_options("127.0.0.1:0"));
  server.start();
  DialledConnection learner(Address(server.address()), {}, kStreamMethod, "the server");
  learner.open();
  learner.shake_hands(std::nullopt);
  const int count = num_tcp_sockets();
  EXPECT_GE(count, 3);
  const pid_t child = fork();
  if (child == 0) _exit(num_tcp_sockets());
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(num_tcp_sockets(), count);
}

// In HTTP/2, to a learner that has dialled: nothing that belongs to a stream.
TEST_F(SocketsTest, AServerThatFloodsIsCutAndNobodyElseIs) {
  EnvServer server(counting(1), server_options("127.0.0.1:0"));
  server.start();
  ListeningSocket socket(Address("127.0.0.1:0"));
  std::atomic<int> num_cut{0};
  Threads threads;
  const auto flood = [&] {
    const std::string settings("\0\0\0\4\0\0\0\0\0", 9);
    const std::string update("\0\0\4\10\0\0\0\0\0\0\0\0\1", 13);
    std::string updates;
    for (int i = 0; i < 1000; ++i) updates += update;
    Descriptor peer(-1);
    while (peer.get() < 0) peer = Descriptor(socket.accept(Milliseconds(100)));
    fcntl(peer.get(), F_SETFL, 0);  // it blocks
    const auto send_all = [&](const std::string& bytes) {
      return send(peer.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
             static_cast<ssize_t>(bytes.size());
    };
    EXPECT_TRUE(send_all(settings));
    size_t num_sent = 0;
    while (send_all(updates) && num_sent < 512 << 20) num_sent += updates.size();
    EXPECT_LT(num_sent, 512 << 20);
    ++num_cut;
  };
  const std::string hostile = "127.0.0.1:" + std::to_string(socket.port());
  Session run(pool_options({server.address(), hostile, hostile, hostile}));
  for (int i = 0; i < 3; ++i) threads.start(flood);
  while (num_cut < 3) run.rollouts();
  EXPECT_EQ(run.pool().stats().num_reconnects, 0u);
}

TEST_F(SocketsTest, ALockThatCanNotBeMadeIsNamed) {
  ASSERT_EQ(symlink("elsewhere", path("socket.lock").c_str()), 0);
  const std::string error =
      error_of<std::runtime_error>([&] { ListeningSocket{Address(unix_address())}; });
  EXPECT_TRUE(contains(error, path("socket.lock") + ": "));
  EXPECT_FALSE(is_there("elsewhere"));
  unlink(path("socket.lock").c_str());
}

}  // namespace
}  // namespace torchbeast
