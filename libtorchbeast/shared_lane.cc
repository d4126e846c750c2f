#include "shared_lane.h"

#include <grpcpp/support/slice.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace torchbeast {

namespace {
// Of a message beyond its arrays: other fields; an error's text comes instead of a
// step.
constexpr size_t kActionRoom = 2 * kLine, kStepRoom = 66 << 10;

size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
}  // namespace

// Messages to one side.
struct alignas(kLine) SharedLane::Direction {
  std::atomic<uint32_t> number;  // of the newest message
  std::atomic<uint32_t> woken;   // by the reader's own side
  std::atomic<uint32_t> ended;   // no more messages come
  std::atomic<uint64_t> size;    // of the newest message
  std::atomic<uint64_t> offset;  // of it, in the room for messages; less than kLine
};

// All of it, followed by the rooms for an action and a step. It begins with zeros.
struct SharedLane::Memory {
  Direction to_environment, to_learner;
  Bell environment_bell;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

std::unique_ptr<SharedLane> SharedLane::make(const StreamSpec& spec,
                                             const wire::SharedMemory& doorbell) {
  if (!spec.has_action_space) return nullptr;
  auto bell = SharedPages::open(doorbell, sizeof(Bell));
  size_t action_bytes = kActionRoom, step_bytes = kStepRoom + spec.step_bytes;
  spec.action.for_each(
      [&](const ArraySpec& array) { action_bytes += array.num_bytes(); });
  for (size_t i = 0; i < spec.num_observation_arrays; ++i) {  // a final observation
    step_bytes += spec.arrays[i].num_bytes();
  }
  action_bytes = lines(action_bytes);
  step_bytes = lines(step_bytes);
  auto pages = SharedPages::make(lines(sizeof(Memory)) + action_bytes + step_bytes);
  if (bell == nullptr || pages == nullptr) return nullptr;
  return std::unique_ptr<SharedLane>(
      new SharedLane(std::move(pages), std::move(bell), action_bytes, step_bytes));
}

std::unique_ptr<SharedLane> SharedLane::open(const wire::SharedMemory& description) {
  const size_t action_bytes = description.action_bytes();
  const size_t step_bytes = description.step_bytes();
  constexpr size_t kMost = 2 * kMaxMessageBytes + kStepRoom;
  for (const size_t bytes : {action_bytes, step_bytes}) {
    if (bytes < kLine || bytes > kMost || lines(bytes) != bytes) return nullptr;
  }
  auto pages =
      SharedPages::open(description, lines(sizeof(Memory)) + action_bytes + step_bytes);
  if (pages == nullptr) return nullptr;
  return std::unique_ptr<SharedLane>(
      new SharedLane(std::move(pages), nullptr, action_bytes, step_bytes));
}

SharedLane::SharedLane(std::unique_ptr<SharedPages> pages,
                       std::unique_ptr<SharedPages> doorbell, size_t action_bytes,
                       size_t step_bytes)
    : pages_(std::move(pages)),
      doorbell_(std::move(doorbell)),
      in_(make_end(doorbell_ == nullptr, action_bytes, step_bytes)),
      out_(make_end(doorbell_ != nullptr, action_bytes, step_bytes)) {}

SharedLane::End SharedLane::make_end(bool to_learner, size_t action_bytes,
                                     size_t step_bytes) const {
  auto& memory = *reinterpret_cast<Memory*>(pages_->data());
  uint8_t* const room = pages_->data() + lines(sizeof(Memory));
  if (!to_learner) {
    return {memory.to_environment, memory.environment_bell, room, action_bytes};
  }
  const SharedPages& doorbell = doorbell_ != nullptr ? *doorbell_ : *doorbell_pages();
  return {memory.to_learner, bell_in(doorbell), room + action_bytes, step_bytes};
}

SharedLane::~SharedLane() { end(); }

wire::SharedMemory SharedLane::description() const {
  wire::SharedMemory description = pages_->description();
  description.set_action_bytes(in_.num_bytes);
  description.set_step_bytes(out_.num_bytes);
  return description;
}

// --- Writing

uint8_t* SharedLane::begin_message(size_t size, size_t offset) {
  if (size > out_.num_bytes - kLine) return nullptr;
  out_.state.size.store(size, std::memory_order_relaxed);
  out_.state.offset.store(offset, std::memory_order_relaxed);
  return out_.room + offset;
}

void SharedLane::send() {
  out_.state.number = ++out_.number;
  out_.bell.ring();
}

bool SharedLane::write(const grpc::ByteBuffer& message) {
  uint8_t* to = begin_message(message.Length(), 0);
  std::vector<grpc::Slice> slices;
  if (to == nullptr || !message.Dump(&slices).ok()) return false;
  for (const grpc::Slice& slice : slices) {
    std::memcpy(to, slice.begin(), slice.size());
    to += slice.size();
  }
  send();
  return true;
}

bool SharedLane::write(const RowMessage& message) {
  uint8_t* const to =
      begin_message(message.num_bytes(), kLine - message.arrays_begin());
  if (to == nullptr) return false;
  message.write(to);
  send();
  return true;
}

void SharedLane::end() {
  out_.state.ended = 1;
  out_.bell.ring();
}

// --- Reading

bool SharedLane::has_ended() const { return in_.state.ended != 0; }

bool SharedLane::has_message() const { return in_.state.number != in_.number; }

bool SharedLane::read(grpc::ByteBuffer* message) {
  const uint32_t number = in_.state.number;
  if (number == in_.number) return false;
  in_.number = number;
  const size_t size = in_.state.size.load(std::memory_order_relaxed);
  const size_t offset = in_.state.offset.load(std::memory_order_relaxed);
  if (offset >= kLine || size > in_.num_bytes - kLine) {
    refuse("message", "shared memory: " + std::to_string(size) + " bytes at " +
                          std::to_string(offset) + " of " +
                          std::to_string(in_.num_bytes));
  }
  const grpc::Slice slice(in_.room + offset, size, grpc::Slice::STATIC_SLICE);
  *message = grpc::ByteBuffer(&slice, 1);
  return true;
}

void SharedLane::wait(Milliseconds limit) {
  const uint32_t count = in_.bell.count();
  if (in_.state.woken.exchange(0) != 0 || has_message() || has_ended()) return;
  in_.bell.wait(count, limit);
}

void SharedLane::wake() {
  in_.state.woken = 1;
  in_.bell.ring();
}

}  // namespace torchbeast
