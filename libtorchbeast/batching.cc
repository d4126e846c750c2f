#include "batching.h"

#include <stdexcept>
#include <utility>

#include "item_queue.h"

namespace torchbeast {

BatchingBase::BatchingBase(BatchingOptions options)
    : queue_(std::make_shared<ItemQueue>(std::move(options))) {}
BatchingBase::~BatchingBase() { close(); }
size_t BatchingBase::size() const { return queue_->size(); }
int64_t BatchingBase::maximum_batch_size() const {
  return queue_->maximum_batch_size();
}

size_t BatchingBase::batch_dim() const { return queue_->options().batch_dim; }
bool BatchingBase::is_closed() const { return queue_->is_closed(); }
bool BatchingBase::close() { return queue_->close(); }
BatchingStats BatchingBase::stats() const { return queue_->stats(); }

// --- BatchingQueue

void BatchingQueue::enqueue(ArrayNest item, const Interrupt& interrupt) {
  const auto is_open = std::make_shared<Awaited<bool>>();
  const auto pushed = queue_->push(std::move(item), nullptr,
                                   [is_open](bool value) { is_open->set(value); });
  if (pushed.has_room) return;
  try {
    if (!is_open->wait(interrupt)) throw_closed();
  } catch (...) {
    queue_->withdraw(pushed.number);
    throw;
  }
}

bool BatchingQueue::offer(ArrayNest item, OnRoom on_room) {
  return queue_->push(std::move(item), nullptr, std::move(on_room)).has_room;
}

std::optional<ArrayNest> BatchingQueue::dequeue(const Interrupt& interrupt) {
  std::vector<Item> items = queue_->take(interrupt);
  if (items.empty()) return std::nullopt;
  return queue_->join(items);
}

// --- DynamicBatcher

ArrayNest DynamicBatcher::compute(ArrayNest inputs, const Interrupt& interrupt) {
  const auto answer = std::make_shared<Awaited<Answer>>();
  const auto pushed = queue_->push(
      std::move(inputs), [answer](Answer& value) { answer->set(std::move(value)); },
      nullptr);
  try {
    return answer->wait(interrupt)();
  } catch (...) {
    queue_->withdraw(pushed.number);
    throw;
  }
}

void DynamicBatcher::ask(ArrayNest inputs, std::function<void(Answer&)> on_done) {
  queue_->push(std::move(inputs), std::move(on_done), nullptr);
}

std::shared_ptr<DynamicBatcher::Batch> DynamicBatcher::next(
    const Interrupt& interrupt) {
  auto batch = std::make_shared<Batch>(queue_);
  std::vector<Item> items = queue_->take(interrupt, &batch->number_);
  if (items.empty()) return nullptr;
  try {
    batch->inputs_ = queue_->join(items);
    for (const Item& item : items) {
      batch->widths_.push_back(item.width);
      batch->size_ += item.width;
    }
  } catch (const std::exception& error) {
    batch->set_error(error.what());
    throw;
  }
  return batch;
}

// --- Batch

DynamicBatcher::Batch::Batch(std::shared_ptr<ItemQueue> queue)
    : queue_(std::move(queue)) {}

DynamicBatcher::Batch::~Batch() { queue_->claim(number_); }

namespace {
[[noreturn]] void throw_answered() {
  throw std::runtime_error(
      "the batch was answered before: call set_outputs or set_error once");
}
}  // namespace

Calls DynamicBatcher::Batch::claim() {
  if (answered_.exchange(true)) throw_answered();
  return queue_->claim(number_);
}

void DynamicBatcher::Batch::set_outputs(const ArrayNest& outputs) {
  if (answered_) throw_answered();
  std::vector<Answer> answers;
  if (!queue_->is_closed()) {  // else there are no calls
    check_outputs(outputs, size_, queue_->options());
    answers.reserve(widths_.size());
    int64_t begin = 0;
    for (int64_t width : widths_) {
      answers.push_back([part = queue_->part(outputs, begin, width)]() mutable {
        return std::move(part);
      });
      begin += width;
    }
  }
  // From here on nothing needs memory: all get their answers, or none.
  Calls calls = claim();
  for (size_t i = 0; i < calls.size(); ++i) calls[i].finish(std::move(answers[i]));
}

void DynamicBatcher::Batch::set_error(const std::string& message) {
  const auto shared = std::make_shared<const std::string>(message);
  for (Call& call : claim()) {
    call.finish([shared]() -> ArrayNest { throw AsyncError(*shared); });
  }
}

}  // namespace torchbeast
