// Environments that dial the learner and are cut off, leave, or come back.

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <deque>
#include <random>

#include "join_fixture.h"

namespace torchbeast {
namespace {

class JoinLossesTest : public JoinTest {};

// A way to the learner that is cut again and again, after some bytes, anywhere in a
// message. Every other time the learner's end stays open, so that it can't know.
class CutWire {
 public:
  CutWire(const std::string& from, const std::string& to, unsigned seed, int num_cuts)
      : to_(to), random_(seed), cuts_left_(num_cuts), listener_(bound_socket(from)) {
    if (listen(listener_, 8) != 0 || pipe(wake_) != 0) std::abort();
    thread_.start([this] { run(); });
  }
  ~CutWire() {
    if (write(wake_[1], "", 1) != 1) std::abort();
    thread_.join();
    for (const Line& line : lines_) hang_up(line.ends);
    hang_up({listener_, wake_[0]});
    hang_up({wake_[1]});
    for (const int fd : abandoned_) close(fd);
  }
  int cuts_left() const { return cuts_left_; }

 private:
  struct Line {
    std::vector<int> ends;  // the environment's, the learner's
    int64_t bytes_left;
  };

  static void hang_up(const std::vector<int>& ends) {
    for (const int fd : ends) close(fd);
  }

  void run() {
    while (true) {
      std::vector<pollfd> fds = {{wake_[0], POLLIN, 0}, {listener_, POLLIN, 0}};
      for (const Line& line : lines_) {
        for (const int fd : line.ends) fds.push_back({fd, POLLIN, 0});
      }
      poll(fds.data(), fds.size(), -1);
      if (fds[0].revents != 0) return;
      for (size_t i = 2; i < fds.size(); ++i) {
        if (fds[i].revents != 0) forward(fds[i].fd);
      }
      if (fds[1].revents != 0) connect_line();
    }
  }

  void connect_line() {
    const int environment = accept(listener_, nullptr, nullptr);
    const int learner = socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un name = socket_name(to_);
    if (connect(learner, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) {
      return hang_up({environment, learner});
    }
    // The handshake is some 1000 bytes, a step and its action some 300.
    lines_.push_back({{environment, learner},
                      std::uniform_int_distribution<int64_t>(500, 9000)(random_)});
  }

  void forward(int fd) {
    const auto line = std::find_if(lines_.begin(), lines_.end(), [fd](const Line& l) {
      return l.ends[0] == fd || l.ends[1] == fd;
    });
    if (line == lines_.end()) return;  // cut a moment ago
    const int other = line->ends[0] == fd ? line->ends[1] : line->ends[0];
    char bytes[4096];
    const auto most =
        std::min(static_cast<int64_t>(sizeof(bytes)),
                 cuts_left_ > 0 ? line->bytes_left : int64_t{sizeof(bytes)});
    const ssize_t size = read(fd, bytes, static_cast<size_t>(most));
    const bool gone = size <= 0 || send(other, bytes, static_cast<size_t>(size),
                                        MSG_NOSIGNAL) != size;
    line->bytes_left -= size;
    const bool cut = cuts_left_ > 0 && line->bytes_left <= 0;
    if (!gone && !cut) return;
    if (cut && --cuts_left_ % 2 == 0) {
      close(line->ends[0]);
      abandoned_.push_back(line->ends[1]);
    } else {
      hang_up(line->ends);
    }
    lines_.erase(line);
  }

  const std::string to_;
  std::mt19937 random_;
  std::atomic<int> cuts_left_;
  const int listener_;
  int wake_[2] = {-1, -1};
  std::vector<Line> lines_;
  std::vector<int> abandoned_;
  Threads thread_;
};

TEST_F(JoinLossesTest, NothingIsLostOrComesTwiceByCuts) {
  const int num_cuts = scaled(500, 200);
  constexpr int64_t kClients = 6;
  // A stream that is cut before its hello stays for a while.
  auto listener = listen(2 * kClients);
  CutWire wire(path("wire"), path("socket"), 7, num_cuts);
  Session run(pool_options(listener));
  std::deque<RunningClient> clients;
  for (int64_t i = 0; i < kClients; ++i) {
    EnvClientOptions client = client_options(unix_address("wire"));
    client.offers_memory = false;  // all bytes pass the wire
    clients.emplace_back(counting(2), client);
  }
  Checker checker(kT, true);
  while (wire.cuts_left() > 0) {
    ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  }
  // All are back and go on.
  const int enough = checker.num_rollouts + 20;
  while (checker.num_rollouts < enough || run.pool().stats().num_connected < kClients) {
    ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  }
  EXPECT_EQ(checker.num_environments(), static_cast<size_t>(2 * kClients));
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 0u);
  EXPECT_GT(run.pool().stats().num_reconnects, static_cast<uint64_t>(num_cuts / 2));
  EXPECT_EQ(listener->stats().num_refused, 0u) << listener->stats().last_refusal;
  uint64_t num_reconnects = 0;
  for (RunningClient& client : clients) {
    num_reconnects += client.client().stats().num_reconnects;
  }
  EXPECT_GT(num_reconnects, static_cast<uint64_t>(num_cuts / 2));
  unlink(path("wire").c_str());
}

TEST_F(JoinLossesTest, ComesBackWithTheSameOrTheNextStep) {
  auto listener = listen();
  Session run(pool_options(listener), 2, 2);  // one rollout at a time
  CountingEnvironment environment(1, 2);
  std::vector<Array> action;
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.say_hello(hello_of(environment, "me", 0));
    stream.send(environment.reset());
    const EnvRow row = keep(environment.step(stream.receive()));
    stream.send(row);
    action = stream.receive();

    // The learner had the step: its action again, though the old stream is still there.
    HandMade second(unix_address());
    second.expect_hello();
    second.say_hello(hello_of(environment, "me", 1));
    second.send(row);
    EXPECT_EQ(second.receive()[0].as<int64_t>()[1], action[0].as<int64_t>()[1]);
    EXPECT_TRUE(contains(stream.end(), "lost"));
  }
  {
    // It had not: the step is taken.
    HandMade third(unix_address());
    third.expect_hello();
    third.say_hello(hello_of(environment, "me", 2));
    third.send(environment.step(action));
    action = third.receive();
  }
  {
    // Nonsense does no harm.
    HandMade fourth(unix_address());
    fourth.expect_hello();
    fourth.say_hello(hello_of(environment, "me", 7));
    CountingEnvironment other(3, 2);
    fourth.send(other.reset());
    EXPECT_TRUE(contains(fourth.end(), "first_step is 7"));
  }
  HandMade fifth(unix_address());
  fifth.expect_hello();
  fifth.say_hello(hello_of(environment, "me", 3));
  fifth.send(environment.step(action));
  for (int i = 3; i < 10; ++i) fifth.send(environment.step(fifth.receive()));
  Checker checker(kT, true);
  ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  EXPECT_EQ(run.pool().stats().num_reconnects, 4u);
  EXPECT_EQ(run.pool().stats().num_steps, 2u * 10);
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 0u);
}

// What the learner sees of environment e of a CountingEnvironment, row by row.
struct Seen {
  std::vector<Position> positions;
  std::vector<float> rewards;
  std::vector<int64_t> actions;
  std::vector<float> truncation_values;
  std::vector<bool> done;
};
Seen see(const ArrayNest& item, int64_t e) {
  const auto& env = item.vector()[0].vector()[0].vector();
  const auto& agent = item.vector()[0].vector()[1].dict();
  const Array& position = env[0].dict().at("position").leaf();
  const int64_t n = position.shape()[1];
  Seen seen;
  for (int64_t k = e; k < position.shape()[0] * n; k += n) {
    seen.positions.push_back(Position::decode(position.as<int64_t>()[k]));
    seen.rewards.push_back(env[1].leaf().as<float>()[k]);
    seen.done.push_back(env[2].leaf().data()[k] != 0);
    seen.actions.push_back(agent.at("action").leaf().as<int64_t>()[k]);
    seen.truncation_values.push_back(
        agent.at("truncation_value").leaf().as<float>()[k]);
  }
  return seen;
}

// Environments of 2 and 3 steps end together in step 6, that of 3 by truncation. They
// leave there, in the middle of a rollout (T = 5) or at its end (T = 6).
TEST_F(JoinLossesTest, WhoComesNextTakesOver) {
  for (const int64_t T : {5, 6}) {
    auto listener = listen(1);
    ActorPoolOptions options = pool_options(listener);
    options.unroll_length = T;
    Session run(options);
    CountingEnvironment a(1, 2), b(2, 2);
    {
      HandMade stream(unix_address());
      stream.expect_hello();
      stream.say_hello(hello_of(a, "a", 0));
      stream.send(a.reset());
      for (int i = 0; i < 6; ++i) stream.send(a.step(stream.receive()));
      stream.leave();
    }
    const ArrayNest rollout_1 = run.rollouts();
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.say_hello(hello_of(b, "b", 0));
    stream.send(b.reset());
    for (int64_t i = 6; i < 2 * T; ++i) stream.send(b.step(stream.receive()));
    const ArrayNest rollout_2 = run.rollouts();
    const size_t t = static_cast<size_t>(6 - T);  // the row of step 6
    for (int64_t e = 0; e < 2; ++e) {
      const Seen last = see(rollout_1, e);
      const Seen seen = see(rollout_2, e);
      // Step 5's action led to the end of a's episodes ...
      const float action =
          static_cast<float>(t > 0 ? seen.actions[t - 1] : last.actions.at(5));
      EXPECT_EQ(seen.rewards.at(t), action);
      EXPECT_TRUE(seen.done.at(t));
      EXPECT_EQ(seen.truncation_values.at(t), e == 1 ? 103 : 0);
      if (T == 6) {
        EXPECT_EQ(last.rewards.at(6), action);
        EXPECT_EQ(last.truncation_values.at(6), e == 1 ? 103 : 0);
      }
      // ... and what follows is b's.
      for (size_t i = t; i < seen.positions.size(); ++i) {
        const Position& at = seen.positions[i];
        ASSERT_EQ(at.stream, 2);
        const auto step = static_cast<int64_t>(i - t);
        EXPECT_EQ(at.episode, step / (2 + e));
        EXPECT_EQ(at.step, step % (2 + e));
        EXPECT_EQ(seen.actions[i], (at.episode + 2 * at.step) % kNumActions);
        if (i > t) {
          EXPECT_EQ(at.last_action, seen.actions[i - 1]);
        }
      }
      for (size_t i = 0; i < t; ++i) EXPECT_EQ(seen.positions[i].stream, 1);
      // The state before row 0, which begins b's episodes if T is 6.
      const int32_t rows = rollout_2.vector()[1].leaf().as<int32_t>()[e * 3];
      EXPECT_EQ(rows, T == 6 ? 0 : (e == 0 ? 1 : 2));
    }
    const ActorPoolStats stats = run.pool().stats();
    EXPECT_EQ(stats.num_dropped_steps, 0u);
    EXPECT_EQ(stats.num_reconnects, 0u);
    EXPECT_GE(stats.num_steps, static_cast<uint64_t>(2 * T * 2));
    run.end();
  }
}

TEST_F(JoinLossesTest, ClientsMayLeaveBetweenEpisodes) {
  auto listener = listen(2);
  Session run(pool_options(listener));
  Threads drain;
  drain.start([&] {
    while (run.queue().dequeue()) {
    }
  });
  for (int i = 0; i < 6; ++i) {
    EnvClient client(counting(2), client_options(unix_address()));
    client.run(3);
    EXPECT_EQ(client.stats().num_episodes, 3u);
    EXPECT_EQ(client.stats().num_steps, 2u * 18);
  }
  // Each waited in its place until the next came; and no action was waited for.
  EXPECT_EQ(run.pool().stats().num_steps, 6u * 2 * 18);
  EXPECT_EQ(run.pool().stats().num_rollouts, 6u * 18 / kT);
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 0u);
  run.end();
  run.queue().close();
}

// Speaks for `environment` until `num_steps` steps are taken, and is gone then.
void play(const std::string& address, CountingEnvironment& environment,
          const std::string& stream_id, int num_steps) {
  HandMade stream(address);
  stream.expect_hello();
  wire::EnvHello hello = environment.hello();
  hello.set_stream_id(stream_id);
  stream.say_hello(hello);
  stream.send(environment.reset());
  for (int i = 0; i < num_steps; ++i) stream.send(environment.step(stream.receive()));
  stream.receive();
}

TEST_F(JoinLossesTest, WhoDoesNotComeBackIsDropped) {
  auto listener = listen(2);
  ActorPoolOptions options = pool_options(listener);
  options.maximum_downtime = Milliseconds(400);
  Session run(options);
  CountingEnvironment environment(1, 2);
  play(unix_address(), environment, "gone", 3);
  wait_until([&] { return run.pool().stats().num_dropped_steps > 0; });
  EXPECT_TRUE(contains(run.pool().stats().last_error, "is lost"));
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 3);
}

TEST_F(JoinLossesTest, WithoutALimitWhoIsAwayIsNotDropped) {
  auto listener = listen(2);
  ActorPoolOptions options = pool_options(listener);
  options.maximum_downtime = Milliseconds::max();
  Session run(options);
  CountingEnvironment environment(1, 2);
  play(unix_address(), environment, "away", 3);
  wait_until([&] { return run.pool().stats().num_connected == 0; });
  std::this_thread::sleep_for(3 * kInterruptPeriod);  // the limit is looked at
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 0u);
  run.end();
}

TEST_F(JoinLossesTest, WhoNeverStepsDoesNotKeepTheRunAlive) {
  auto listener = listen(2);
  ActorPoolOptions options = pool_options(listener);
  // A join takes long on a busy machine.
  options.check = end_without_streams(Milliseconds(2000));
  Session run(options);
  auto error = std::async(std::launch::async, [&] {
    const std::string text = error_of<TransportError>([&] { run.wait(); });
    listener->close();  // else who joins now waits for the next pool
    return text;
  });
  // One after the other sends its first observation, and is gone.
  const auto is_over = [&] {
    return error.wait_for(Milliseconds(50)) == std::future_status::ready;
  };
  int num_joined = 0;
  while (!is_over() && num_joined < 200) {
    CountingEnvironment environment(1, 2);
    try {
      play(unix_address(), environment, "", 0);
    } catch (const TransportError&) {
      break;  // the learner has ended
    }
    ++num_joined;
  }
  EXPECT_GT(num_joined, 1);
  EXPECT_LT(num_joined, 200);
  run.pool().close();  // or get() would never return if the run went on
  EXPECT_TRUE(contains(error.get(), "no stream"));
}

TEST_F(JoinLossesTest, NobodyAtAllEndsTheRun) {
  auto listener = listen();
  EXPECT_TRUE(contains(
      error_of<TransportError>([&] { listener->probe(Milliseconds(50)); }), "within"));
  ActorPoolOptions options = pool_options(listener);
  options.check =
      [&, end = end_without_streams(Milliseconds(300))](const PoolFacts& facts) {
        EXPECT_EQ(facts.listener, unix_address());
        EXPECT_TRUE(facts.peers.empty());
        end(facts);
      };
  Session run(options);
  EXPECT_THROW(run.wait(), TransportError);
}

TEST_F(JoinLossesTest, NewcomersTakeThePlacesOfTheLost) {
  auto listener = listen(1);
  Session run(pool_options(listener));
  CountingEnvironment environment(1, 2);
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.say_hello(hello_of(environment, "here", 0));
    stream.send(environment.reset());
    const std::vector<Array> action = stream.receive();
    CountingEnvironment other(2, 2);
    HandMade second(unix_address());
    second.expect_hello();
    second.say_hello(hello_of(other, "there", 0));
    second.send(other.reset());
    EXPECT_TRUE(contains(second.end(), "all 1 places are taken"));
    stream.send(environment.step(action));
    stream.receive();
  }
  wait_until([&] { return run.pool().stats().num_connected == 0; });
  CountingEnvironment other(2, 2);
  play(unix_address(), other, "there", 2);
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 1);
}

TEST_F(JoinLossesTest, ALearnerThatComesBackIsFound) {
  auto listener = listen();
  RunningClient client(counting(2), client_options(unix_address()));
  {
    Session run(pool_options(listener));
    for (int i = 0; i < 5; ++i) run.rollouts();
    run.end();
  }
  listener->close();
  listener = listen();
  Session run(pool_options(listener), 2, 2);  // one rollout at a time
  Position last{};
  for (int i = 0; i < 5; ++i) {
    // A new unroll, maybe from the middle of an episode; what comes is whole.
    const Seen seen = see(run.rollouts(), 1);
    for (size_t t = 0; t < seen.positions.size(); ++t) {
      const Position& at = seen.positions[t];
      if (t > 0) {
        EXPECT_EQ(at.last_action, seen.actions[t - 1]);
        EXPECT_EQ(at.episode * 3 + at.step, last.episode * 3 + last.step + 1);
      } else if (i > 0) {
        EXPECT_EQ(at.encode(), last.encode());
      } else {
        EXPECT_GT(at.episode, 0);
      }
      last = at;
    }
  }
  EXPECT_EQ(num_streams_, 1) << "it is the same environment";
}

}  // namespace
}  // namespace torchbeast
