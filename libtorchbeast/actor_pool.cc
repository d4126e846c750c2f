#include "actor_pool.h"

#include <future>
#include <utility>

#include "connection.h"
#include "pool_streams.h"
#include "thread.h"

namespace torchbeast {

ActorPool::ActorPool(ActorPoolOptions options,
                     std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     ArrayNest initial_agent_state) {
  if (options.unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be at least 1, got " +
                                std::to_string(options.unroll_length));
  }
  for (const BatchingBase* queue :
       {static_cast<BatchingBase*>(learner_queue.get()),
        static_cast<BatchingBase*>(inference_batcher.get())}) {
    if (queue->batch_dim() == 1) continue;
    throw std::invalid_argument(
        "the learner queue and the inference batcher must have batch_dim 1, because "
        "rows are [time, batch, ...]; one has " +
        std::to_string(queue->batch_dim()));
  }
  if (options.addresses.empty() && options.listener == nullptr) {
    throw std::invalid_argument(
        "env_server_addresses is empty, and there is no listener");
  }
  for (const std::string& address : options.addresses) {
    client_credentials(Address(address), options.security);  // checks both
  }
  if (options.hello) {
    const size_t num_joined =
        options.listener ? static_cast<size_t>(options.listener->max_streams()) : 0;
    try {
      check_rollout_bytes(StreamSpec(*options.hello), options.unroll_length,
                          options.addresses.size() + num_joined,
                          options.max_rollout_bytes);
    } catch (const TooManyBytes& error) {
      throw std::invalid_argument(error.what());
    }
  }
  MemoryPool pool;  // what comes in may be Python's; actors want memory of their own
  ArrayNest state = initial_agent_state.map([&pool](const Array& array) {
    if (array.shape().size() < 2) {
      throw std::invalid_argument(
          "the initial agent state's arrays must be [layers, n, ...], and one is " +
          array.shape().to_string());
    }
    Array copied = pool.allocate(array.spec());
    copy(array, copied);
    return copied;
  });
  shared_ =
      std::make_shared<PoolStreams>(std::move(options), std::move(learner_queue),
                                    std::move(inference_batcher), std::move(state));
}

ActorPool::~ActorPool() { close(); }

void ActorPool::run() {
  const std::shared_ptr<PoolStreams> owner = shared_;  // this may go before its end
  owner->run();
}

void ActorPool::close() { shared_->close(); }

void ActorPool::settle() { shared_->hellos.settle(); }

EventLog& ActorPool::events() { return shared_->events; }

uint64_t ActorPool::count() const { return shared_->sessions.unrolls.num_steps; }

ActorPoolStats ActorPool::stats() const { return shared_->stats(); }

wire::EnvHello ActorPool::probe(const std::string& address, const Security& security,
                                Milliseconds timeout,
                                const ExpectedEnvironment& expected,
                                const Interrupt& interrupt) {
  DialledConnection connection(Address(address), security, kStreamMethod,
                               "the environment server");
  std::packaged_task<wire::EnvHello()> ask([&] {
    connection.open();  // which may take long
    wire::EnvHello hello;
    try {
      hello = connection.shake_hands(std::nullopt);
    } catch (const WireError& error) {
      throw WireError(connection.peer() + " breaks the rules: " + error.what());
    }
    // The environment that was made to answer is gone afterwards.
    static_cast<void>(end_of([&] { connection.leave(); }));
    expected.check(hello, connection.peer());
    return hello;
  });
  std::future<wire::EnvHello> hello = ask.get_future();
  const Thread asking(std::move(ask));
  try {
    const auto deadline = time_after(timeout);
    while (hello.wait_for(kInterruptPeriod) != std::future_status::ready) {
      if (interrupt) interrupt();
      bound_dialled(2 * kMaxHelloBytes);
      if (Clock::now() >= deadline) connection.cancel("has not answered in time");
    }
  } catch (...) {
    connection.cancel("is no longer wanted");
    throw;
  }
  return hello.get();
}

}  // namespace torchbeast
