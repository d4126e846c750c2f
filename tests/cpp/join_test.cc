// Environments that dial the learner: Listener, ActorPool and EnvClient together, and
// peers that speak the wire by hand.

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <deque>
#include <random>

#include "client.h"
#include "connection.h"
#include "listener.h"
#include "server.h"
#include "session.h"

namespace torchbeast {
namespace {

constexpr int64_t kT = 5;

// An environment's side of a stream, by hand.
class HandMade {
 public:
  HandMade(const std::string& address, std::string token = "")
      : connection_(Address(address), with_token(std::move(token)), kJoinMethod,
                    "the learner") {
    connection_.open();
  }

  void expect_hello() {
    EXPECT_EQ(connection_.expect_agent_hello().version(), kWireVersion);
  }
  void say_hello(const wire::EnvHello& hello) {
    wire::EnvMessage message;
    *message.mutable_hello() = hello;
    connection_.write(encode(message));
  }
  void send(const EnvRow& row) { connection_.write(encode_step(row, pool_)); }
  void send(const grpc::ByteBuffer& message) { connection_.write(message); }
  // The action for two environments.
  std::vector<Array> receive() {
    grpc::ByteBuffer message;
    connection_.read(&message);
    std::vector<Array> action = {pool_.allocate({DType::kInt64, {2}})};
    decode_action(&message, action);
    return action;
  }
  void leave() { connection_.leave(); }
  // Why the learner ends the stream.
  std::string end() {
    return error_of<std::runtime_error>([&] {
      grpc::ByteBuffer message;
      while (true) connection_.read(&message);
    });
  }

 private:
  static Security with_token(std::string token) {
    Security security;
    security.token = std::move(token);
    return security;
  }

  DialledConnection connection_;
  MemoryPool pool_;
};

// A row of its own, not the environment's.
EnvRow keep(const EnvRow& row) {
  static MemoryPool pool;
  EnvRow kept;
  for (const Array& array : row.arrays) {
    kept.arrays.push_back(pool.allocate(array.spec()));
    copy(array, kept.arrays.back());
  }
  for (const Array& array : row.final_observation) {
    kept.final_observation.push_back(pool.allocate(array.spec()));
    copy(array, kept.final_observation.back());
  }
  return kept;
}

class JoinTest : public GuardedTest {
 protected:
  JoinTest() : directory_(temporary_directory()) {}
  ~JoinTest() override { rmdir(directory_.c_str()); }

  std::string unix_address() const { return "unix:" + directory_ + "/learner"; }

  std::shared_ptr<Listener> listen(int max_streams = 4, const std::string& token = "",
                                   const std::string& address = "") {
    ListenerOptions options;
    options.address = address.empty() ? unix_address() : address;
    options.security.token = token;
    options.max_streams = max_streams;
    options.hello_timeout = Milliseconds(500);
    auto listener = std::make_shared<Listener>(options);
    listener->start();
    return listener;
  }

  static ActorPoolOptions pool_options(std::shared_ptr<Listener> listener) {
    ActorPoolOptions options;
    options.unroll_length = kT;
    options.listener = std::move(listener);
    options.maximum_downtime = Milliseconds(60'000);
    return options;
  }

  static EnvClientOptions client_options(const std::string& address) {
    EnvClientOptions options;
    options.address = address;
    return options;
  }

  // Each environment has the next number.
  EnvironmentFactory counting(int64_t num_envs) {
    return [this, num_envs] {
      return std::make_unique<CountingEnvironment>(num_streams_++, num_envs);
    };
  }

  static wire::EnvHello hello_of(const Environment& environment,
                                 const std::string& stream_id, uint64_t first_step) {
    wire::EnvHello hello = environment.hello();
    hello.set_stream_id(stream_id);
    hello.set_first_step(first_step);
    return hello;
  }

  const std::string directory_;
  std::atomic<int64_t> num_streams_{0};
};

// A client that runs in a thread.
class RunningClient {
 public:
  RunningClient(EnvironmentFactory factory, const EnvClientOptions& options,
                std::optional<uint64_t> num_episodes = std::nullopt)
      : client_(std::move(factory), options),
        done_(std::async(std::launch::async,
                         [this, num_episodes] { client_.run(num_episodes); })) {}
  ~RunningClient() {
    client_.stop();
    if (done_.valid()) done_.wait();
  }
  // Throws what run() throws.
  void wait() { done_.get(); }
  EnvClient& client() { return client_; }

 private:
  EnvClient client_;
  std::future<void> done_;
};

TEST_F(JoinTest, RolloutsAreWhatHappened) {
  auto listener = listen();
  RunningClient a(counting(3), client_options(unix_address()));
  const wire::EnvHello hello = listener->probe(Milliseconds(60'000));
  EXPECT_EQ(hello.environment(), "Counting-v0");
  EXPECT_EQ(hello.num_envs(), 3u);
  Session run(pool_options(listener));
  RunningClient b(counting(3), client_options(unix_address()));
  Checker checker(kT, true);
  while (checker.num_rollouts < 60 || checker.num_environments() < 6) {
    ASSERT_NO_FATAL_FAILURE(checker.check(run.rollouts()));
  }
  const ActorPoolStats stats = run.pool().stats();
  EXPECT_EQ(stats.num_connected, 2u);
  EXPECT_EQ(stats.num_reconnects, 0u);
  EXPECT_GT(stats.env_seconds, 0);
  EXPECT_EQ(listener->stats().num_streams, 2u);
  run.end();
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 0u) << "unfinished, not dropped";
  EXPECT_EQ(run.pool().stats().num_connected, 0u);
}

TEST_F(JoinTest, DiallingAndListeningGoTogether) {
  auto listener = listen(4, "", "127.0.0.1:0");
  StreamServerOptions server_options;
  server_options.address = "unix:" + directory_ + "/server";
  EnvServer server(counting(2), server_options);
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

// --- Losses
// ---------------------------------------------------------------------------

// A way to the learner that is cut again and again, after some bytes, anywhere in a
// message. Every other time the learner's end stays open, so that it can't know.
class CutWire {
 public:
  CutWire(const std::string& from, const std::string& to, unsigned seed, int num_cuts)
      : to_(to), random_(seed), cuts_left_(num_cuts) {
    unlink(from.c_str());
    listener_ = socket(AF_UNIX, SOCK_STREAM, 0);
    const sockaddr_un name = name_of(from);
    if (bind(listener_, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 ||
        listen(listener_, 8) != 0 || pipe(wake_) != 0) {
      std::abort();
    }
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

  static sockaddr_un name_of(const std::string& path) {
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    path.copy(name.sun_path, sizeof(name.sun_path) - 1);
    return name;
  }
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
    const sockaddr_un name = name_of(to_);
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
  int listener_ = -1;
  int wake_[2] = {-1, -1};
  std::vector<Line> lines_;
  std::vector<int> abandoned_;
  Threads thread_;
};

TEST_F(JoinTest, NothingIsLostOrComesTwiceByCuts) {
  const char* scale = std::getenv("TB_STRESS_SCALE");
  const int num_cuts =
      std::max(200, static_cast<int>(500 * (scale ? std::atof(scale) : 1)));
  constexpr int64_t kClients = 6;
  // A stream that is cut before its hello stays for a while.
  auto listener = listen(2 * kClients);
  const std::string path = directory_ + "/wire";
  CutWire wire(path, directory_ + "/learner", 7, num_cuts);
  Session run(pool_options(listener));
  std::deque<RunningClient> clients;
  for (int64_t i = 0; i < kClients; ++i) {
    clients.emplace_back(counting(2), client_options("unix:" + path));
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
  unlink(path.c_str());
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
TEST_F(JoinTest, WhoComesNextTakesOver) {
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
      // The state before row 0.
      const int32_t rows = rollout_2.vector()[1].leaf().as<int32_t>()[e * 3];
      EXPECT_EQ(rows, T == 6 ? (e == 0 ? 2 : 3) : (e == 0 ? 1 : 2));
    }
    const ActorPoolStats stats = run.pool().stats();
    EXPECT_EQ(stats.num_dropped_steps, 0u);
    EXPECT_EQ(stats.num_reconnects, 0u);
    EXPECT_GE(stats.num_steps, static_cast<uint64_t>(2 * T * 2));
    run.end();
  }
}

TEST_F(JoinTest, ClientsMayLeaveBetweenEpisodes) {
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

template <typename F>
void wait_until(const F& f) {
  while (!f()) std::this_thread::yield();
}

TEST_F(JoinTest, ComesBackWithTheSameOrTheNextStep) {
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

TEST_F(JoinTest, WhoDoesNotComeBackIsDropped) {
  auto listener = listen(2);
  ActorPoolOptions options = pool_options(listener);
  options.maximum_downtime = Milliseconds(400);
  Session run(options);
  CountingEnvironment environment(1, 2);
  play(unix_address(), environment, "gone", 3);
  // In the end nobody is there at all.
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_TRUE(contains(error, "no environment has joined at unix:"));
  EXPECT_TRUE(contains(error, "for 0.4 s"));
  EXPECT_TRUE(contains(error, "is lost"));
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 3);
}

TEST_F(JoinTest, NobodyAtAllEndsTheRun) {
  auto listener = listen();
  EXPECT_TRUE(contains(
      error_of<TransportError>([&] { listener->probe(Milliseconds(50)); }), "within"));
  ActorPoolOptions options = pool_options(listener);
  options.maximum_downtime = Milliseconds(300);
  Session run(options);
  const std::string error = error_of<TransportError>([&] { run.wait(); });
  EXPECT_TRUE(contains(error, "no environment has joined at unix:"));
}

TEST_F(JoinTest, NewcomersTakeThePlacesOfTheLost) {
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

TEST_F(JoinTest, ALearnerThatComesBackIsFound) {
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
  HandMade late(unix_address());
  EXPECT_TRUE(contains(late.end(), "about to end"));
  Session third(pool_options(listener));
  third.rollouts();
}

// --- Peers that lie or are silent
// -----------------------------------------------------

TEST_F(JoinTest, StrangersAreRefused) {
  auto listener = listen();
  Session run(pool_options(listener));
  RunningClient client(counting(2), client_options(unix_address()));
  run.rollouts();

  CountingEnvironment environment(1, 2);
  MemoryPool pool;
  const EnvRow row = keep(environment.reset());
  const auto refusal = [&](const wire::EnvHello& hello, const grpc::ByteBuffer& step) {
    HandMade stream(unix_address());
    stream.expect_hello();
    try {
      stream.say_hello(hello);
      stream.send(step);
    } catch (const TransportError& error) {  // already
      return std::string(error.what());
    }
    return stream.end();
  };
  const grpc::ByteBuffer good = encode_step({row.arrays, {}, 0}, pool);

  EXPECT_TRUE(contains(refusal(CountingEnvironment(1, 3).hello(), good), "differ"));
  EXPECT_TRUE(contains(
      refusal(CountingEnvironment(1, 2, true, "Other-v0").hello(), good), "Other-v0"));
  EXPECT_TRUE(
      contains(refusal(CountingEnvironment(1, 2, false).hello(), good), "truncated"));
  wire::EnvHello hello = environment.hello();
  hello.set_version(1);
  EXPECT_TRUE(contains(refusal(hello, good), "speaks version 1 of the protocol"));
  EXPECT_TRUE(
      contains(refusal(hello_of(environment, std::string(65, 'x'), 0), good), "65"));
  EXPECT_TRUE(contains(refusal(hello_of(environment, "x", uint64_t{1} << 63), good),
                       "first_step"));
  const auto with = [&](size_t i, const ArraySpec& spec) {
    std::vector<Array> arrays = row.arrays;
    arrays[i] = pool.allocate(spec);
    return encode_step({arrays, {}, 0}, pool);
  };
  EXPECT_TRUE(
      contains(refusal(environment.hello(), with(0, {DType::kUint8, {2, 2, 4}})),
               "step: 68 bytes"));
  const grpc::Slice garbage(std::string(100, '\xff'));
  EXPECT_TRUE(contains(refusal(environment.hello(), grpc::ByteBuffer(&garbage, 1)),
                       "malformed"));
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.send(good);
    EXPECT_TRUE(contains(stream.end(), "before the hello"));
  }
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.send(encode_error("no such game"));
    stream.leave();  // all was read
    EXPECT_TRUE(contains(listener->stats().last_refusal, "no such game"));
  }
  EXPECT_EQ(listener->stats().num_refused, 9u);
  run.rollouts();  // which has not been disturbed
  EXPECT_EQ(run.pool().stats().num_connected, 1u);
}

TEST_F(JoinTest, SilentPeersAreCut) {
  auto listener = listen();
  ActorPoolOptions options = pool_options(listener);
  options.step_timeout = Milliseconds(500);
  Session run(options);
  HandMade silent(unix_address());
  silent.expect_hello();
  EXPECT_TRUE(contains(silent.end(), "lost"));
  HandMade hesitant(unix_address());
  CountingEnvironment environment(1, 2);
  hesitant.expect_hello();
  hesitant.say_hello(environment.hello());
  EXPECT_TRUE(contains(hesitant.end(), "lost"));
  HandMade stuck(unix_address());
  stuck.expect_hello();
  stuck.say_hello(hello_of(environment, "stuck", 0));
  stuck.send(environment.reset());
  stuck.receive();
  EXPECT_TRUE(contains(stuck.end(), "lost"));
  wait_until([&] { return run.pool().stats().num_connected == 0; });
  EXPECT_TRUE(contains(run.pool().stats().last_error, "step timeout"));
}

TEST_F(JoinTest, TokensAreChecked) {
  auto listener = listen(4, "a-secret");
  Session run(pool_options(listener));
  for (const std::string token : {"", "a-secre", "b-secret"}) {
    EnvClientOptions options = client_options(unix_address());
    options.security.token = token;
    EnvClient client(counting(2), options);
    EXPECT_TRUE(contains(error_of<RefusedError>([&] { client.run(); }), "token"));
  }
  EXPECT_EQ(listener->stats().num_refused, 3u);
  EnvClientOptions options = client_options(unix_address());
  options.security.token = "a-secret";
  RunningClient client(counting(2), options);
  run.rollouts();
}

TEST_F(JoinTest, SocketsArePrivateAndRemoved) {
  auto listener = listen();
  struct stat status;
  const std::string path = directory_ + "/learner";
  ASSERT_EQ(stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_TRUE(contains(error_of<std::runtime_error>([&] { listen(); }),
                       "another server listens there"));
  listener->close();
  EXPECT_NE(stat(path.c_str(), &status), 0);
  listener->close();
  ListenerOptions options;
  options.address = "0.0.0.0:0";
  EXPECT_THROW(Listener{options}, std::invalid_argument);
}

TEST_F(JoinTest, AnUnusableHelloIsNotTheMeasure) {
  auto listener = listen();
  CountingEnvironment bad(1, 3);
  HandMade first(unix_address()), second(unix_address());
  for (HandMade* stream : {&first, &second}) {
    stream->expect_hello();
    stream->say_hello(bad.hello());
    stream->send(bad.reset());
  }
  const wire::EnvHello found = listener->probe(Milliseconds(60'000));
  EXPECT_EQ(found.num_envs(), 3u);
  listener->refuse(found, "E must be 2");
  EXPECT_TRUE(contains(first.end(), "E must be 2"));
  EXPECT_TRUE(contains(second.end(), "E must be 2"));

  RunningClient client(counting(2), client_options(unix_address()));
  ActorPoolOptions options = pool_options(listener);
  options.hello = listener->probe(Milliseconds(60'000));
  EXPECT_EQ(options.hello->num_envs(), 2u);
  Session run(options);
  run.rollouts();
  HandMade third(unix_address());
  third.expect_hello();
  third.say_hello(bad.hello());
  EXPECT_TRUE(contains(third.end(), "E must be 2"));
  run.rollouts();
  EXPECT_EQ(listener->stats().num_refused, 3u);
  const std::vector<Event> events = listener->events().take().first;
  ASSERT_EQ(events.size(), 3u);
  for (const Event& event : events) {
    EXPECT_EQ(event.kind, Event::kRefused);
    EXPECT_TRUE(contains(event.text, "E must be 2"));
  }
}

TEST_F(JoinTest, BadValuesCostTheirStream) {
  auto listener = listen();
  Session run(pool_options(listener));
  RunningClient client(counting(2), client_options(unix_address()));
  run.rollouts();
  CountingEnvironment environment(7, 2);
  HandMade stream(unix_address());
  stream.expect_hello();
  stream.say_hello(environment.hello());
  stream.send(environment.reset());
  stream.send(environment.step(stream.receive()));
  EnvRow row = keep(environment.step(stream.receive()));
  row.arrays[2].as<float>()[1] = std::nanf("");
  stream.send(row);
  EXPECT_TRUE(contains(stream.end(), "reward: nan in environment 1; allowed are"));
  run.rollouts();
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 1);
  EXPECT_EQ(listener->stats().num_refused, 1u);
  EXPECT_TRUE(contains(listener->events().take().first.at(0).text, "reward: nan"));
}

TEST_F(JoinTest, AnEnvironmentThatRaisesCostsItsStream) {
  auto listener = listen();
  Session run(pool_options(listener));
  RunningClient client(counting(2), client_options(unix_address()));
  run.rollouts();
  CountingEnvironment environment(7, 2);
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.say_hello(hello_of(environment, "bad", 0));
    stream.send(environment.reset());
    stream.send(environment.step(stream.receive()));
    stream.receive();
    stream.send(encode_error("Traceback: it broke"));
    stream.leave();
  }
  run.rollouts();
  EXPECT_EQ(run.pool().stats().num_env_failures, 1u);
  EXPECT_EQ(run.pool().stats().num_dropped_steps, 2u * 1);
  const std::vector<Event> events = run.pool().events().take().first;
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, Event::kEnvError);
  EXPECT_TRUE(contains(events[0].text, "Traceback: it broke"));
  // In place of the hello, it counts too.
  {
    HandMade stream(unix_address());
    stream.expect_hello();
    stream.send(encode_error("no such game"));
    stream.leave();
  }
  EXPECT_EQ(run.pool().stats().num_env_failures, 2u);
  EXPECT_TRUE(contains(listener->events().take().first.at(0).text, "no such game"));
}

// --- Clients
// --------------------------------------------------------------------------

TEST_F(JoinTest, AnEnvironmentsErrorReachesBothSides) {
  class Failing : public CountingEnvironment {
   public:
    using CountingEnvironment::CountingEnvironment;
    EnvRow step(const std::vector<Array>& action) override {
      if (++count_ == 8) throw std::runtime_error("Traceback: it broke in step 8");
      return CountingEnvironment::step(action);
    }

   private:
    int count_ = 0;
  };
  auto listener = listen();
  ActorPoolOptions options = pool_options(listener);
  options.max_env_failures = 0;
  Session run(options);
  RunningClient client([] { return std::make_unique<Failing>(0, 2); },
                       client_options(unix_address()));
  EXPECT_TRUE(contains(error_of<std::runtime_error>([&] { client.wait(); }), "step 8"));
  EXPECT_TRUE(contains(error_of<std::runtime_error>([&] { run.wait(); }), "step 8"));
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
  const int silent = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  (directory_ + "/learner").copy(name.sun_path, sizeof(name.sun_path) - 1);
  ASSERT_EQ(bind(silent, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  ASSERT_EQ(::listen(silent, 8), 0);
  EnvClientOptions options = client_options(unix_address());
  options.maximum_downtime = Milliseconds(400);
  options.hello_timeout = Milliseconds(300);
  EnvClient client(counting(2), options);
  EXPECT_TRUE(contains(error_of<TransportError>([&] { client.run(); }),
                       "has not answered in time"));
  close(silent);
  unlink((directory_ + "/learner").c_str());
}

TEST_F(JoinTest, StopWakesAClientThatWaits) {
  EnvClientOptions options = client_options(unix_address());
  options.maximum_downtime.reset();
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
  EnvClient stopped(counting(2), options);
  stopped.stop();
  stopped.run();
}

TEST_F(JoinTest, CloseAtAnyMoment) {
  const char* scale = std::getenv("TB_STRESS_SCALE");
  const int repeats =
      std::max(10, static_cast<int>(200 * (scale ? std::atof(scale) : 1)));
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
