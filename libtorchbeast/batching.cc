#include "batching.h"

#include <utility>

#include "item_queue.h"

namespace torchbeast {

BatchingBase::BatchingBase(BatchingOptions options)
    : queue_(std::make_shared<ItemQueue>(std::move(options))) {}
BatchingBase::~BatchingBase() { close(); }
size_t BatchingBase::size() const { return queue_->size(); }
bool BatchingBase::is_closed() const { return queue_->is_closed(); }
bool BatchingBase::close() { return queue_->close(); }
BatchingStats BatchingBase::stats() const { return queue_->stats(); }

// --- BatchingQueue

void BatchingQueue::enqueue(ArrayNest item, const Interrupt& interrupt) {
  queue_->push(std::move(item), Call(), interrupt);
}

bool BatchingQueue::try_enqueue(ArrayNest& item) {
  return queue_->try_push(item, Call());
}

std::optional<ArrayNest> BatchingQueue::dequeue(const Interrupt& interrupt) {
  std::vector<Item> items = queue_->take(interrupt);
  if (items.empty()) return std::nullopt;
  return queue_->join(items);
}

// --- DynamicBatcher

// The callers of one batch, and whether they have been answered.
struct DynamicBatcher::Batch::State {
  explicit State(std::shared_ptr<ItemQueue> item_queue)
      : queue(std::move(item_queue)) {}
  ~State() { queue->forget(calls.get()); }

  bool is_answered() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    return answered;
  }
  // Succeeds for the first caller; std::runtime_error for all others.
  void claim() TB_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    if (answered) throw_answered();
    answered = true;
  }
  [[noreturn]] static void throw_answered() {
    throw std::runtime_error(
        "the batch was answered before: call set_outputs or set_error once");
  }
  void fail(const std::string& text) {
    const auto message = std::make_shared<const std::string>(text);
    claim();
    for (const Call& call : *calls) call.fail(message);
    queue->forget(calls.get());
  }

  const std::shared_ptr<ItemQueue> queue;
  const std::shared_ptr<Calls> calls = std::make_shared<Calls>();
  std::vector<int64_t> widths;  // of each call
  int64_t size = 0;             // their sum
  Mutex mutex;
  bool answered TB_GUARDED_BY(mutex) = false;
};

ArrayNest DynamicBatcher::compute(ArrayNest inputs, const Interrupt& interrupt) {
  const auto waiter = std::make_shared<Waiter>();
  queue_->push(std::move(inputs), Call(waiter), interrupt);
  Stopwatch stopwatch(queue_->producer_wait());
  try {
    return waiter->wait(interrupt);
  } catch (...) {
    queue_->withdraw(waiter.get());
    throw;
  }
}

void DynamicBatcher::ask(ArrayNest inputs, std::function<void(const Answer&)> on_done) {
  const auto waiter = std::make_shared<Waiter>();
  queue_->try_push(inputs, Call(waiter));
  // It lives until then: in its call, or here.
  waiter->when_done([on_done = std::move(on_done), waiter = waiter.get()] {
    on_done([waiter] { return waiter->wait(nullptr); });
  });
}

std::shared_ptr<DynamicBatcher::Batch> DynamicBatcher::next(
    const Interrupt& interrupt) {
  while (true) {
    auto state = std::make_unique<Batch::State>(queue_);
    std::vector<Item> items = queue_->take(interrupt, state->calls);
    if (items.empty()) return nullptr;
    try {
      ArrayNest inputs = queue_->join(items);
      for (const Item& item : items) {
        state->widths.push_back(item.width);
        state->size += item.width;
      }
      return std::make_shared<Batch>(std::move(inputs), std::move(state));
    } catch (const std::invalid_argument& error) {
      // The callers' mistake, not the consumer's.
      state->fail(error.what());
    } catch (const std::exception& error) {
      if (state) state->fail(error.what());
      throw;
    }
  }
}

DynamicBatcher::Batch::Batch(ArrayNest inputs, std::unique_ptr<State> state)
    : inputs_(std::move(inputs)), state_(std::move(state)) {}

DynamicBatcher::Batch::~Batch() = default;

int64_t DynamicBatcher::Batch::size() const { return state_->size; }

void DynamicBatcher::Batch::set_outputs(const ArrayNest& outputs) {
  ItemQueue& queue = *state_->queue;
  if (state_->is_answered()) State::throw_answered();
  if (queue.is_closed()) {
    state_->claim();
    return;
  }
  check_outputs(outputs, state_->size, queue.options());
  std::vector<ArrayNest> parts;
  parts.reserve(state_->widths.size());
  int64_t begin = 0;
  for (int64_t width : state_->widths) {
    parts.push_back(queue.part(outputs, begin, width));
    begin += width;
  }
  state_->claim();
  for (size_t i = 0; i < parts.size(); ++i) {
    (*state_->calls)[i].answer(std::move(parts[i]));
  }
  queue.forget(state_->calls.get());
}

void DynamicBatcher::Batch::set_error(const std::string& message) {
  state_->fail(message);
}

}  // namespace torchbeast
