// An actor pool with queues and an agent, whose rollouts can be checked exactly: the
// environments are those of counting_environment.h.

#pragma once

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "actor_pool.h"
#include "counting_environment.h"
#include "server.h"
#include "test_util.h"

namespace torchbeast {

// A field of rows, which have them by name or by place.
inline const ArrayNest& field(const ArrayNest& row, const std::string& name) {
  if (row.is_map()) return row.dict().at(name);
  const std::vector<std::string> names{"observation", "reward", "done", "episode_step",
                                       "episode_return"};
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return row.vector().at(5).dict().at(name);
  return row.vector().at(static_cast<size_t>(found - names.begin()));
}

// What the agent does:
//   action           (episode + 2 * step) % 7 of the position
//   baseline         the position's step + 100
//   state [2, n, 3]  counts the rows since the episode began
class CountingAgent {
 public:
  static ArrayNest initial_state() {
    return ArrayNest(make_array({2, 1, 3}, {0, 0, 0, 0, 0, 0}));
  }

  ArrayNest act(const ArrayNest& inputs) {
    const ArrayNest& row = inputs.vector()[0];
    const Array& position = field(row, "observation").dict().at("position").leaf();
    const Array& done = field(row, "done").leaf();
    const int64_t n = position.shape()[1];
    const Array action = memory_.allocate({DType::kInt64, {1, n}});
    const Array baseline = memory_.allocate({DType::kFloat32, {1, n}});
    const Array zero = memory_.allocate({DType::kFloat32, {1, n}});
    const Array state = memory_.allocate({DType::kInt32, {2, n, 3}});
    const Array& state_before = inputs.vector()[1].leaf();
    EXPECT_EQ(state_before.shape(), (Shape{2, n, 3}));
    for (int64_t i = 0; i < n; ++i) {
      const Position at = Position::decode(position.as<int64_t>()[i]);
      action.as<int64_t>()[i] = (at.episode + 2 * at.step) % kNumActions;
      baseline.as<float>()[i] = static_cast<float>(at.step + 100);
      zero.as<float>()[i] = 0;
      for (int64_t layer = 0; layer < 2; ++layer) {
        for (int64_t j = 0; j < 3; ++j) {
          const int64_t k = (layer * n + i) * 3 + j;
          state.as<int32_t>()[k] =
              done.data()[i] ? 1 : state_before.as<int32_t>()[k] + 1;
        }
      }
    }
    if (as_tuple) {
      return ArrayNest(
          ArrayNest::Vector{ArrayNest(ArrayNest::Vector{action, baseline}), state});
    }
    ArrayNest::Map outputs{
        {"action", action}, {"baseline", baseline}, {"truncation_value", zero}};
    return ArrayNest(ArrayNest::Vector{ArrayNest(std::move(outputs)), state});
  }

  std::atomic<bool> as_tuple{false};  // outputs (action, baseline), not a dict

 private:
  MemoryPool memory_;
};

// A pool with its queues and a CountingAgent.
class Session {
 public:
  explicit Session(ActorPoolOptions options, int64_t minimum = 1, int64_t maximum = 64)
      : queue_(std::make_shared<BatchingQueue>([&] {
          BatchingOptions o = batch_sizes(minimum, maximum);
          o.maximum_queue_size = 4;
          return o;
        }())),
        batcher_(std::make_shared<DynamicBatcher>(batch_sizes(1, 64))),
        pool_(options, queue_, batcher_, CountingAgent::initial_state()) {
    threads_.start([this] { infer(); });
    done_ = std::async(std::launch::async, [this] {
      try {
        pool_.run();
      } catch (...) {
        queue_->close();  // wakes rollouts()
        throw;
      }
    });
  }

  ~Session() {
    pool_.close();
    if (done_.valid()) done_.wait();
    batcher_->close();
    queue_->close();
  }

  // Ends the pool; throws what run() throws.
  void end() {
    pool_.close();
    if (done_.valid()) done_.get();
  }
  // Waits until it has ended by itself.
  void wait() { done_.get(); }

  ArrayNest rollouts() {
    std::optional<ArrayNest> item = queue_->dequeue();
    if (!item) wait();
    return std::move(item).value();
  }
  ActorPool& pool() { return pool_; }
  BatchingQueue& queue() { return *queue_; }
  DynamicBatcher& batcher() { return *batcher_; }

 private:
  void infer() {
    while (auto batch = batcher_->next()) {
      batch->set_outputs(agent_.act(batch->inputs()));
    }
  }

  CountingAgent agent_;
  std::shared_ptr<BatchingQueue> queue_;
  std::shared_ptr<DynamicBatcher> batcher_;
  ActorPool pool_;
  Threads threads_;
  std::future<void> done_;
};

// Whether an inference that fails ends a run with its error although it closes the
// batcher at once; after `close`, whether it does not.
inline testing::AssertionResult ends_with_failure(const ActorPoolOptions& options,
                                                  bool close = false) {
  auto queue = std::make_shared<BatchingQueue>(batch_sizes(1, 64));
  auto batcher = std::make_shared<DynamicBatcher>(batch_sizes(1, 64));
  ActorPool pool(options, queue, batcher, CountingAgent::initial_state());
  Threads threads;
  threads.start([&] {
    CountingAgent agent;
    for (int k = 0; k < 20; ++k) {
      const auto batch = batcher->next();
      batch->set_outputs(agent.act(batch->inputs()));
    }
    const auto last = batcher->next();
    if (close) pool.close();
    last->set_error("boom");
    batcher->close();
  });
  threads.start([&] {
    while (queue->dequeue()) {
    }
  });
  const std::string error = error_of<AsyncError>([&] { pool.run(); });
  queue->close();
  return contains(error, close ? "nothing" : "boom");
}

// Checks of a pool, see ActorPoolOptions. Each throws EnvironmentError or
// TransportError with the facts' text.

// If more environments have raised.
inline std::function<void(const PoolFacts&)> end_after_failures(uint64_t limit) {
  return [limit, number = uint64_t{0}](const PoolFacts& facts) mutable {
    for (const auto& [origin, peer] : facts.peers) number += peer.num_failures;
    if (number > limit) throw EnvironmentError(facts.last_failure);
  };
}

inline void end_at_an_error(const PoolFacts& facts) {
  if (!facts.last_error.empty()) throw TransportError(facts.last_error);
}

inline void end_if_all_refuse(const PoolFacts& facts) {
  if (facts.num_refusing < facts.num_servers) return;
  throw TransportError(facts.last_error);
}

// If no stream was there for so long.
inline std::function<void(const PoolFacts&)> end_without_streams(Milliseconds limit) {
  return [limit, up_at = Clock::time_point::min()](const PoolFacts& facts) mutable {
    if (up_at == Clock::time_point::min()) up_at = facts.time;
    bool is_up = false;
    for (const auto& [origin, peer] : facts.peers) {
      is_up |= peer.is_present;
      up_at = std::max(up_at, peer.proven_at);
    }
    if (is_up || facts.time - up_at <= limit) return;
    throw TransportError("no stream: " + facts.last_error);
  };
}

// Checks every row of every rollout against what must come after the row before.
class Checker {
 public:
  Checker(int64_t T, bool with_truncation) : T_(T), with_truncation_(with_truncation) {}

  void check(const ArrayNest& item) {
    const ArrayNest& rows = item.vector()[0];
    const ArrayNest& env = rows.is_map() ? rows : rows.vector()[0];
    const auto& agent = (rows.is_map() ? rows : rows.vector()[1]).dict();
    if (rows.is_map()) {
      ASSERT_EQ(agent.size(), with_truncation_ ? 12u : 11u);
    } else {
      ASSERT_EQ(env.vector().size(), with_truncation_ ? 6u : 5u);
    }
    const auto& observation = field(env, "observation").dict();
    const Array& picture = observation.at("picture").leaf();
    const Array& position = observation.at("position").leaf();
    const int64_t n = position.shape()[1];
    ASSERT_EQ(picture.spec(), (ArraySpec{DType::kUint8, {T_ + 1, n, 2, 3}}));
    ASSERT_EQ(position.spec(), (ArraySpec{DType::kInt64, {T_ + 1, n}}));
    const Array& state = item.vector()[1].leaf();
    ASSERT_EQ(state.shape(), (Shape{2, n, 3}));
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t t = 0; t <= T_; ++t) {
        const int64_t k = t * n + i;
        Row row;
        row.at = Position::decode(position.as<int64_t>()[k]);
        row.reward = field(env, "reward").leaf().as<float>()[k];
        row.done = field(env, "done").leaf().data()[k];
        row.episode_step = field(env, "episode_step").leaf().as<int64_t>()[k];
        row.episode_return = field(env, "episode_return").leaf().as<float>()[k];
        row.action = agent.at("action").leaf().as<int64_t>()[k];
        row.truncated = with_truncation_ && field(env, "truncated").leaf().data()[k];
        ASSERT_EQ(picture.data()[k * 6 + 5], row.at.step);
        ASSERT_EQ(row.action, (row.at.episode + 2 * row.at.step) % kNumActions);
        const float truncation_value =
            agent.at("truncation_value").leaf().as<float>()[k];
        const auto key = std::make_pair(row.at.stream, row.at.env);
        if (t == 0) {
          const int32_t rows = state.as<int32_t>()[i * 3];
          const auto last = last_.find(key);
          if (last == last_.end()) {
            ASSERT_EQ(rows, 0);
            ASSERT_TRUE(row.done);
            ASSERT_EQ(row.at.episode, 0);
          } else {
            ASSERT_EQ(last->second.at.encode(), row.at.encode()) << "row 0 is row T";
            ASSERT_EQ(last->second.action, row.action);
            // The state before this row: one for each row of the episode before it.
            ASSERT_EQ(rows, row.done ? row.episode_step : row.at.step);
          }
        } else {
          const Row& before = last_.at(key);
          ASSERT_EQ(row.at.last_action, before.action);
          ASSERT_EQ(row.reward, static_cast<float>(before.action));
          ASSERT_EQ(row.done, before.at.step + 1 == 2 + row.at.env);
          ASSERT_EQ(row.at.episode, before.at.episode + (row.done ? 1 : 0));
          ASSERT_EQ(row.at.step, row.done ? 0 : before.at.step + 1);
          ASSERT_EQ(row.episode_step, before.at.step + 1);
          ASSERT_EQ(row.episode_return, static_cast<float>(10 * row.episode_step));
          ASSERT_EQ(row.truncated,
                    with_truncation_ && row.done && before.at.episode % 2 == 1);
          // At the end of an episode of 2 + e steps the agent says 100 + 2 + e.
          ASSERT_EQ(truncation_value,
                    row.truncated ? static_cast<float>(102 + row.at.env) : 0.0f);
        }
        last_[key] = row;
      }
    }
    ++num_rollouts;
  }

  int num_rollouts = 0;
  size_t num_environments() const { return last_.size(); }

 private:
  struct Row {
    Position at;
    float reward, episode_return;
    bool done, truncated;
    int64_t episode_step, action;
  };
  const int64_t T_;
  const bool with_truncation_;
  std::map<std::pair<int64_t, int64_t>, Row> last_;
};

// A test with a directory for sockets, environments that count, and a pool's options.
class SessionTest : public GuardedTest {
 protected:
  SessionTest() : directory_(temporary_directory()) {}
  ~SessionTest() override { rmdir(directory_.c_str()); }

  std::string path(const std::string& name) const { return directory_ + "/" + name; }
  std::string unix_address(const std::string& name = "socket") const {
    return "unix:" + path(name);
  }

  // Each environment has the next number.
  EnvironmentFactory counting(int64_t num_envs, bool with_truncation = true) {
    return [this, num_envs, with_truncation] {
      return std::make_unique<CountingEnvironment>(num_streams_++, num_envs,
                                                   with_truncation);
    };
  }

  static StreamServerOptions server_options(const std::string& address) {
    StreamServerOptions options;
    options.address = address;
    return options;
  }

  static ActorPoolOptions pool_options(std::vector<std::string> addresses,
                                       int64_t T = 5) {
    ActorPoolOptions options;
    options.unroll_length = T;
    options.addresses = std::move(addresses);
    options.maximum_downtime = Milliseconds(10'000);
    return options;
  }

  const std::string directory_;
  std::atomic<int64_t> num_streams_{0};

 private:
  static std::string temporary_directory() {
    // mkdtemp wants a name that ends in six X, and puts others in their place.
    std::string name = testing::TempDir() + "torchbeast_test_XXXXXX";
    return mkdtemp(name.data());
  }
};

inline sockaddr_un socket_name(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  path.copy(name.sun_path, sizeof(name.sun_path) - 1);
  return name;
}

// A bare socket at this path. The caller closes and unlinks it.
inline int bound_socket(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  const sockaddr_un name = socket_name(path);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) {
    std::abort();
  }
  return fd;
}

}  // namespace torchbeast
