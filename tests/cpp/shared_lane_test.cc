// Both sides of a lane in one process, each with its own mapping of the memory, and
// peers that lie.

#include "shared_lane.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "messages.h"
#include "test_util.h"

namespace torchbeast {
namespace {

using SharedLaneTest = GuardedTest;

// E environments with an observation of `size` bytes.
StreamSpec make_spec(int64_t E, uint64_t size) {
  wire::EnvHello hello;
  hello.set_version(kWireVersion);
  hello.set_num_envs(static_cast<uint32_t>(E));
  wire::Space::Box& box = *hello.mutable_observation_space()->mutable_box();
  box.set_dtype(wire::UINT8);
  box.add_shape(size);
  hello.mutable_action_space()->mutable_discrete()->set_n(7);
  return StreamSpec(hello);
}

EnvRow make_row(const StreamSpec& spec, uint8_t value, bool truncated = false) {
  static MemoryPool pool;
  EnvRow row;
  for (const ArraySpec& array : spec.arrays) {
    row.arrays.push_back(pool.allocate(array));
    const bool is_bool = array.dtype == DType::kBool;
    std::memset(row.arrays.back().data(), is_bool ? 1 : value,
                row.arrays.back().num_bytes());
  }
  if (truncated) row.final_observation = {row.arrays[0]};
  row.env_nanoseconds = row.action_number = uint64_t{1} << 52;  // many bytes
  return row;
}

// Whether the lane has exactly this message next.
testing::AssertionResult reads(SharedLane& lane, const std::string& bytes) {
  grpc::ByteBuffer message;
  if (!lane.has_message() || !lane.read(&message)) {
    return testing::AssertionFailure() << "no message";
  }
  if (bytes_of(message) != bytes) return testing::AssertionFailure() << "another one";
  if (lane.has_message()) return testing::AssertionFailure() << "one more";
  return testing::AssertionSuccess();
}

// A lane's memory behind the nonce, as its other side sees it.
std::unique_ptr<SharedPages> pages_of(const SharedLane& lane, size_t* num_bytes) {
  const wire::SharedMemory memory = lane.description();
  const std::string path = "/proc/self/fd/" + std::to_string(memory.file());
  *num_bytes = std::filesystem::file_size(path) - kLine;
  return SharedPages::open(memory, *num_bytes);
}

size_t num_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:torchbeast") != std::string::npos) ++count;
  }
  return count;
}

struct Lane {
  explicit Lane(const StreamSpec& spec)
      : environment(SharedLane::make(spec, doorbell_pages()->description())),
        learner(SharedLane::open(spec, environment->description())) {}
  std::unique_ptr<SharedLane> environment, learner;
};

TEST_F(SharedLaneTest, CarriesStepsAndActionsInTurn) {
  MemoryPool pool;
  for (const int64_t E : {1, 3}) {
    const StreamSpec spec = make_spec(E, 977);
    Lane lane(spec);
    ASSERT_NE(lane.learner, nullptr);
    lane.environment->close_file();
    for (int i = 1; i < 300; ++i) {
      const EnvRow step = make_row(spec, static_cast<uint8_t>(i), i % 3 == 0);
      ASSERT_TRUE(lane.environment->write(step_message(step)));
      ASSERT_TRUE(reads(*lane.learner, bytes_of(encode(step_message(step), pool))));
      const std::vector<Array> action{numbered({E, 2}, i)};
      const auto number = static_cast<uint64_t>(i);
      ASSERT_TRUE(lane.learner->write(action_message(action, number)));
      ASSERT_TRUE(
          reads(*lane.environment, bytes_of(encode_action(action, number, pool))));
    }
  }
}

TEST_F(SharedLaneTest, AnErrorHasRoomAndALongerMessageHasNone) {
  const StreamSpec spec = make_spec(1, 1);
  Lane lane(spec);
  const grpc::ByteBuffer error = encode_error(std::string(1 << 20, 'x'));
  ASSERT_TRUE(lane.environment->write(error));
  EXPECT_TRUE(reads(*lane.learner, bytes_of(error)));
  EXPECT_FALSE(lane.environment->write(buffer_of(std::string(1 << 20, 'x'))));
  EXPECT_FALSE(lane.learner->write(buffer_of(std::string(4096, 'x'))));
  EXPECT_FALSE(lane.learner->has_message());
  EXPECT_FALSE(lane.environment->has_message());
}

TEST_F(SharedLaneTest, AWaitEndsWithAMessageTheEndOrACall) {
  const Milliseconds long_time(1000);
  for (const std::string how : {"message", "end", "gone", "wake"}) {
    Lane lane(make_spec(1, 1));
    Threads threads;
    const auto start = Clock::now();
    threads.start([&] {
      std::this_thread::sleep_for(Milliseconds(50));
      if (how == "message") {
        EXPECT_TRUE(lane.learner->write(buffer_of("hello")));
      }
      if (how == "end") lane.learner->end();
      if (how == "gone") lane.learner = nullptr;
      if (how == "wake") lane.environment->wake();
    });
    lane.environment->wait(long_time);
    EXPECT_LT(Clock::now() - start, Milliseconds(900)) << how;
    threads.join();
    EXPECT_EQ(lane.environment->has_message(), how == "message");
    EXPECT_EQ(lane.environment->has_ended(), how == "end" || how == "gone");
    // It was used up, and did not get lost either.
    if (how == "wake") {
      lane.environment->wake();
      lane.environment->wait(long_time);
      EXPECT_LT(Clock::now() - start, Milliseconds(900));
    }
  }
}

TEST_F(SharedLaneTest, NoMessageIsLostBetweenThreads) {
  const StreamSpec spec = make_spec(1, 64);
  Lane lane(spec);
  const int count = scaled(100'000);
  Threads threads;
  const auto next = [](SharedLane& side) {
    grpc::ByteBuffer message;
    const auto start = Clock::now();
    while (!side.read(&message)) side.wait(Milliseconds(1000));
    // A wake-up that was lost would take the whole limit.
    EXPECT_LT(Clock::now() - start, Milliseconds(900));
    return bytes_of(message);
  };
  threads.start([&] {
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(next(*lane.environment), "action " + std::to_string(i));
      ASSERT_TRUE(lane.environment->write(buffer_of("step " + std::to_string(i))));
    }
  });
  for (int i = 0; i < count; ++i) {
    ASSERT_TRUE(lane.learner->write(buffer_of("action " + std::to_string(i))));
    ASSERT_EQ(next(*lane.learner), "step " + std::to_string(i));
  }
}

TEST_F(SharedLaneTest, NothingIsLeft) {
  const size_t before = num_mappings();
  {
    Lane lane(make_spec(2, 100));
    EXPECT_EQ(num_mappings(), before + 3);  // two of the lane, and the doorbell's
  }
  EXPECT_EQ(num_mappings(), before);
}

TEST_F(SharedLaneTest, AnActionOfAnySizeHasNoLane) {
  StreamSpec spec = make_spec(1, 1);
  const Lane lane(spec);
  ASSERT_NE(lane.learner, nullptr);
  spec.has_action_space = false;
  EXPECT_EQ(SharedLane::make(spec, doorbell_pages()->description()), nullptr);
  EXPECT_EQ(SharedLane::open(spec, lane.environment->description()), nullptr);
}

// --- Lies

TEST_F(SharedLaneTest, MemoryThatIsNotAsDescribedIsNotOpened) {
  const StreamSpec spec = make_spec(1, 1);
  const auto lane = SharedLane::make(spec, doorbell_pages()->description());
  const wire::SharedMemory good = lane->description();
  ASSERT_NE(SharedLane::open(spec, good), nullptr);
  const auto opens = [&](const std::function<void(wire::SharedMemory*)>& change) {
    wire::SharedMemory changed = good;
    change(&changed);
    return SharedLane::open(spec, changed) != nullptr;
  };
  EXPECT_FALSE(opens([](auto* m) { m->clear_nonce(); }));
  EXPECT_FALSE(opens([](auto* m) { (*m->mutable_nonce())[3] ^= 1; }));
  EXPECT_FALSE(opens([](auto* m) { m->set_process(1); }));
  EXPECT_FALSE(opens([](auto* m) { m->set_process(0); }));
  EXPECT_FALSE(opens([](auto* m) { m->set_process(0xffffffff); }));
  EXPECT_FALSE(opens([](auto* m) { m->set_file(0xffffffff); }));
  // Its rooms are too small or too large for the hello's spaces.
  EXPECT_EQ(SharedLane::open(make_spec(99, 1), good), nullptr);
  EXPECT_EQ(SharedLane::open(make_spec(1, 4096), good), nullptr);
  const auto large =
      SharedLane::make(make_spec(2, 100), doorbell_pages()->description());
  EXPECT_EQ(SharedLane::open(spec, large->description()), nullptr);
  EXPECT_EQ(SharedLane::make(spec, {}), nullptr);  // no doorbell
}

TEST_F(SharedLaneTest, OtherFilesAreNotOpened) {
  const StreamSpec spec = make_spec(1, 1);
  const auto lane = SharedLane::make(spec, doorbell_pages()->description());
  wire::SharedMemory described = lane->description();
  int pipes[2], sockets[2];
  ASSERT_EQ(pipe(pipes), 0);
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  // A copy of the memory that its owner can make shorter.
  const int copy = memfd_create("torchbeast", MFD_CLOEXEC);
  const std::string path = "/proc/self/fd/" + std::to_string(described.file());
  const std::string bytes = [&] {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }();
  ASSERT_EQ(write(copy, bytes.data(), bytes.size()),
            static_cast<ssize_t>(bytes.size()));
  const int folder = ::open("/", O_RDONLY | O_DIRECTORY);
  for (const int file : {pipes[0], pipes[1], sockets[0], copy, folder}) {
    described.set_file(static_cast<uint32_t>(file));
    EXPECT_EQ(SharedLane::open(spec, described), nullptr) << file;
    close(file);
  }
  close(sockets[1]);
}

TEST_F(SharedLaneTest, MemoryOfAnotherUserIsNotOpened) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  for (const uid_t user : {uid_t{0}, uid_t{65534}}) {
    int pipes[2];
    ASSERT_EQ(pipe(pipes), 0);
    const pid_t child = fork();
    if (child == 0) {  // makes memory, and keeps it until it is killed
      if (setuid(user) != 0) _exit(1);
      const auto pages = SharedPages::make(64);
      const std::string said = pages->description().SerializeAsString();
      if (write(pipes[1], said.data(), said.size()) < 0) _exit(1);
      while (true) pause();
    }
    char said[256];
    const ssize_t size = read(pipes[0], said, sizeof(said));
    wire::SharedMemory description;
    EXPECT_TRUE(description.ParseFromArray(said, static_cast<int>(size)));
    EXPECT_EQ(SharedPages::open(description, 64) != nullptr, user == 0);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    for (const int file : pipes) close(file);
  }
}

TEST_F(SharedLaneTest, WhatAPeerScribblesIsRefusedOrBounded) {
  const StreamSpec spec = make_spec(1, 100);
  Lane lane(spec);
  ASSERT_TRUE(lane.environment->write(buffer_of("hello")));
  const wire::SharedMemory described = lane.environment->description();
  const std::string path = "/proc/self/fd/" + std::to_string(described.file());
  const int file = ::open(path.c_str(), O_RDWR);
  EXPECT_NE(ftruncate(file, 64), 0);  // it is sealed
  close(file);
  size_t size;
  const auto pages = pages_of(*lane.environment, &size);
  for (const uint8_t value : {0xff, 0x7f, 0x41, 0x01}) {
    std::memset(pages->data(), value, size);
    for (SharedLane* side : {lane.environment.get(), lane.learner.get()}) {
      grpc::ByteBuffer message;
      try {
        if (side->read(&message)) {
          EXPECT_LT(message.Length(), size);
          bytes_of(message);
        }
      } catch (const WireError&) {
      }
      side->wait(Milliseconds(1));
    }
    lane.learner->write(buffer_of("hello"));
  }
}

TEST_F(SharedLaneTest, WhatAPeerWritesIntoABellLosesNoWakeUp) {
  Lane lane(make_spec(1, 1));
  const auto doorbell =
      SharedPages::open(doorbell_pages()->description(), sizeof(Bell));
  auto* const words = reinterpret_cast<std::atomic<uint32_t>*>(doorbell->data());
  for (size_t word = 0; word < sizeof(Bell) / sizeof(*words); ++word) {
    for (const uint32_t value : {0xffffffffu, 0u, 0xfffffffeu}) {
      words[word] = value;
      for (int i = 0; i < 2; ++i) {
        Threads threads;
        threads.start([&] {
          std::this_thread::sleep_for(Milliseconds(50));
          EXPECT_TRUE(lane.environment->write(buffer_of("hello")));
        });
        const auto start = Clock::now();
        lane.learner->wait(Milliseconds(1000));
        EXPECT_LT(Clock::now() - start, Milliseconds(900)) << word << " " << value;
        threads.join();
        EXPECT_TRUE(reads(*lane.learner, "hello"));
      }
    }
  }
}

TEST_F(SharedLaneTest, AMessageThatWasSeenCanNotBeTakenBack) {
  Lane lane(make_spec(1, 100));
  size_t size;
  const auto pages = pages_of(*lane.environment, &size);
  for (SharedLane* side : {lane.environment.get(), lane.learner.get()}) {
    SharedLane& other = side == lane.learner.get() ? *lane.environment : *lane.learner;
    ASSERT_TRUE(other.write(buffer_of("hello")));
    ASSERT_TRUE(side->has_message());
    std::memset(pages->data(), 0, size);
    EXPECT_TRUE(reads(*side, ""));  // else read() would wait for the next
  }
}

}  // namespace
}  // namespace torchbeast
