// What the tests of environments that dial the learner share: a listener, clients that
// run in a thread, and peers that speak the wire by hand.

#pragma once

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client.h"
#include "connection.h"
#include "listener.h"
#include "messages.h"
#include "session.h"

namespace torchbeast {

constexpr int64_t kT = 5;

class JoinTest : public SessionTest {
 protected:
  std::shared_ptr<Listener> listen(int max_streams = 4,
                                   const std::string& address = "") {
    ListenerOptions options;
    options.address = address.empty() ? unix_address() : address;
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

  static wire::EnvHello hello_of(const Environment& environment,
                                 const std::string& stream_id, uint64_t first_step) {
    wire::EnvHello hello = environment.hello();
    hello.set_stream_id(stream_id);
    hello.set_first_step(first_step);
    return hello;
  }
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

// An environment's side of a stream, by hand.
class HandMade {
 public:
  explicit HandMade(const std::string& address)
      : connection_(Address(address), Security(), kJoinMethod, "the learner") {
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
  // With the number of the last action.
  void send(EnvRow row) {
    row.action_number = number_;
    connection_.write(encode_step(row, pool_));
  }
  void send(const grpc::ByteBuffer& message) { connection_.write(message); }
  // The action for two environments.
  std::vector<Array> receive() {
    grpc::ByteBuffer message;
    connection_.read(&message);
    std::vector<Array> action = {pool_.allocate({DType::kInt64, {2}})};
    number_ = decode_action(&message, action);
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
  DialledConnection connection_;
  uint64_t number_ = 0;
  MemoryPool pool_;
};

// A copy of a row: the environment reuses its arrays.
inline EnvRow keep(const EnvRow& row) {
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

template <typename F>
void wait_until(const F& f) {
  while (!f()) std::this_thread::yield();
}

}  // namespace torchbeast
