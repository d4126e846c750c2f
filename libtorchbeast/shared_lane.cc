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

// In bytes.
struct SharedLane::Sizes {
  size_t action_room, step_room, memory;
};

SharedLane::Sizes SharedLane::sizes(const StreamSpec& spec) {
  const size_t action = lines(kActionRoom + spec.action_bytes);
  // With a final observation.
  const size_t step = lines(kStepRoom + spec.step_bytes + spec.observation_bytes);
  // A line follows: a number whose last byte changes while it is read goes on there.
  return {action, step, lines(sizeof(Memory)) + action + step + kLine};
}

std::unique_ptr<SharedLane> SharedLane::make(const StreamSpec& spec,
                                             const wire::SharedMemory& doorbell) {
  if (!spec.has_action_space) return nullptr;
  const Sizes sizes = SharedLane::sizes(spec);
  auto bell = SharedPages::open(doorbell, sizeof(Bell));
  auto pages = SharedPages::make(sizes.memory);
  if (bell == nullptr || pages == nullptr) return nullptr;
  return std::unique_ptr<SharedLane>(
      new SharedLane(std::move(pages), std::move(bell), sizes));
}

std::unique_ptr<SharedLane> SharedLane::open(const StreamSpec& spec,
                                             const wire::SharedMemory& description) {
  if (!spec.has_action_space) return nullptr;
  const Sizes sizes = SharedLane::sizes(spec);
  auto pages = SharedPages::open(description, sizes.memory);
  if (pages == nullptr) return nullptr;
  return std::unique_ptr<SharedLane>(new SharedLane(std::move(pages), nullptr, sizes));
}

SharedLane::SharedLane(std::unique_ptr<SharedPages> pages,
                       std::unique_ptr<SharedPages> doorbell, const Sizes& sizes)
    : pages_(std::move(pages)),
      doorbell_(std::move(doorbell)),
      in_(make_way(doorbell_ == nullptr, sizes)),
      out_(make_way(doorbell_ != nullptr, sizes)) {}

SharedLane::Way SharedLane::make_way(bool to_learner, const Sizes& sizes) const {
  auto& memory = *reinterpret_cast<Memory*>(pages_->data());
  uint8_t* const room = pages_->data() + lines(sizeof(Memory));
  if (!to_learner) {
    return {memory.to_environment, memory.environment_bell, room, sizes.action_room};
  }
  const SharedPages& doorbell = doorbell_ != nullptr ? *doorbell_ : *doorbell_pages();
  return {memory.to_learner, bell_in(doorbell), room + sizes.action_room,
          sizes.step_room};
}

SharedLane::~SharedLane() { end(); }

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

bool SharedLane::has_message() {
  const uint32_t number = in_.state.number;
  if (number != in_.number) has_message_ = true;
  in_.number = number;
  return has_message_;
}

bool SharedLane::read(grpc::ByteBuffer* message) {
  if (!has_message()) return false;
  has_message_ = false;
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
