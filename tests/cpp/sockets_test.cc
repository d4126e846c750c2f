// Sockets at which servers listen: one server at a time has the path of a unix socket.

#include "sockets.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

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
