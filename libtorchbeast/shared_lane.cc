#include "shared_lane.h"

#include <grpcpp/support/slice.h>

#include <climits>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "stream_spec.h"

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace torchbeast {

namespace {
constexpr size_t kNonceBytes = 16;
// Of a message beyond its arrays: other fields; an error's text comes instead of a
// step.
constexpr size_t kActionRoom = 2 * kLine, kStepRoom = 66 << 10;

size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
}  // namespace

// Messages to one side.
struct alignas(kLine) SharedLane::Direction {
  std::atomic<uint32_t> number;    // of the newest message
  std::atomic<uint32_t> bell;      // changes with all that ends a wait
  std::atomic<uint32_t> sleeping;  // whether the reader waits for the bell
  std::atomic<uint32_t> woken;     // by its own side
  std::atomic<uint32_t> ended;     // no more messages come
  std::atomic<uint64_t> size;      // of the newest message
  std::atomic<uint64_t> offset;    // of it, in the room for messages; less than kLine

  uint8_t* data(Memory* memory) const;
  void ring();
};

// All of it, followed by an action and a step. It begins with zeros.
struct SharedLane::Memory {
  uint8_t nonce[kNonceBytes];
  Direction to_environment, to_learner;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

#if defined(__linux__)

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

void wait_for_change(std::atomic<uint32_t>* word, uint32_t value, Milliseconds limit) {
  const auto ms = std::clamp(limit, Milliseconds(0), Milliseconds(1000)).count();
  const timespec time{ms / 1000, ms % 1000 * 1'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Null if there is no room in this process.
void* map(int file, size_t num_bytes) {
  void* const memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, num_bytes, MADV_DONTFORK);  // a child must not take part
  return memory;
}

}  // namespace

std::unique_ptr<SharedLane> SharedLane::make(size_t action_bytes, size_t step_bytes) {
  action_bytes = lines(action_bytes + kActionRoom);
  step_bytes = lines(step_bytes + kStepRoom);
  const size_t num_bytes = sizeof(Memory) + action_bytes + step_bytes;
  const int file = memfd_create("torchbeast lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) return nullptr;
  void* memory = nullptr;
  // The pages are taken now: later, a lack of them would end the process. The seals
  // keep the other side from making the file shorter, which would, too.
  if (posix_fallocate(file, 0, static_cast<off_t>(num_bytes)) == 0 &&
      fcntl(file, F_ADD_SEALS, kSeals) == 0) {
    memory = map(file, num_bytes);
  }
  if (memory == nullptr) {
    ::close(file);
    return nullptr;
  }
  auto* const all = static_cast<Memory*>(memory);
  std::random_device random;
  for (uint8_t& byte : all->nonce) byte = static_cast<uint8_t>(random());
  return std::unique_ptr<SharedLane>(
      new SharedLane(file, all, num_bytes, action_bytes, step_bytes, false));
}

std::unique_ptr<SharedLane> SharedLane::open(const wire::SharedMemory& description) {
  const size_t action_bytes = description.action_bytes();
  const size_t step_bytes = description.step_bytes();
  constexpr size_t kMost = kMaxMessageBytes + 2 * kStepRoom;
  if (action_bytes < kLine || action_bytes > kMost || step_bytes < kLine ||
      step_bytes > kMost || lines(action_bytes) != action_bytes ||
      lines(step_bytes) != step_bytes || description.nonce().size() != kNonceBytes) {
    return nullptr;
  }
  const size_t num_bytes = sizeof(Memory) + action_bytes + step_bytes;
  // In another container, there may be another process of this number, or none.
  const std::string path = "/proc/" + std::to_string(description.process()) + "/fd/" +
                           std::to_string(description.file());
  // Only regular files are opened: others could wait or act.
  struct stat about {};
  if (stat(path.c_str(), &about) != 0 || !S_ISREG(about.st_mode)) return nullptr;
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) return nullptr;
  void* memory = nullptr;
  const int seals = fcntl(file, F_GET_SEALS);
  if (fstat(file, &about) == 0 && S_ISREG(about.st_mode) && about.st_uid == geteuid() &&
      seals != -1 && (seals & kSeals) == kSeals &&
      about.st_size == static_cast<off_t>(num_bytes)) {
    memory = map(file, num_bytes);
  }
  ::close(file);
  if (memory == nullptr) return nullptr;
  auto* const all = static_cast<Memory*>(memory);
  if (std::memcmp(all->nonce, description.nonce().data(), kNonceBytes) != 0) {
    munmap(memory, num_bytes);
    return nullptr;
  }
  return std::unique_ptr<SharedLane>(
      new SharedLane(-1, all, num_bytes, action_bytes, step_bytes, true));
}

SharedLane::~SharedLane() {
  end();
  close_file();
  munmap(memory_, num_bytes_);
}

wire::SharedMemory SharedLane::description() const {
  wire::SharedMemory description;
  description.set_process(static_cast<uint32_t>(getpid()));
  description.set_file(static_cast<uint32_t>(file_));
  description.set_nonce(memory_->nonce, kNonceBytes);
  description.set_action_bytes(action_bytes_);
  description.set_step_bytes(step_bytes_);
  return description;
}

void SharedLane::close_file() {
  if (file_ >= 0) ::close(std::exchange(file_, -1));
}

// The reader says that it sleeps and looks again; the writer writes and looks whether
// the reader sleeps. All of these are in one order, so one of them sees the other.
void SharedLane::Direction::ring() {
  ++bell;
  if (sleeping != 0) wake_all(&bell);
}

void SharedLane::wait(Milliseconds limit) {
  const uint32_t bell = in_.bell;
  in_.sleeping = 1;
  if (in_.woken.exchange(0) == 0 && in_.number == num_read_ && in_.ended == 0) {
    wait_for_change(&in_.bell, bell, limit);
  }
  in_.sleeping = 0;
}

#else  // no lanes

std::unique_ptr<SharedLane> SharedLane::make(size_t, size_t) { return nullptr; }
std::unique_ptr<SharedLane> SharedLane::open(const wire::SharedMemory&) {
  return nullptr;
}
SharedLane::~SharedLane() = default;
wire::SharedMemory SharedLane::description() const { return {}; }
void SharedLane::close_file() {}
void SharedLane::Direction::ring() { ++bell; }
void SharedLane::wait(Milliseconds) {}

#endif

SharedLane::SharedLane(int file, Memory* memory, size_t num_bytes, size_t action_bytes,
                       size_t step_bytes, bool is_learner)
    : file_(file),
      memory_(memory),
      num_bytes_(num_bytes),
      action_bytes_(action_bytes),
      step_bytes_(step_bytes),
      is_learner_(is_learner),
      in_(is_learner ? memory->to_learner : memory->to_environment),
      out_(is_learner ? memory->to_environment : memory->to_learner) {}

uint8_t* SharedLane::begin_message(size_t size, size_t offset) {
  if (size + kLine > (is_learner_ ? action_bytes_ : step_bytes_)) return nullptr;
  out_.size.store(size, std::memory_order_relaxed);
  out_.offset.store(offset, std::memory_order_relaxed);
  auto* const room = reinterpret_cast<uint8_t*>(memory_ + 1);
  return room + (is_learner_ ? 0 : action_bytes_) + offset;
}

void SharedLane::send() {
  out_.number = ++num_written_;
  out_.ring();
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
  const size_t offset = kLine - message.arrays_begin();
  uint8_t* const to = begin_message(message.num_bytes(), offset);
  if (to == nullptr) return false;
  message.write(to);
  send();
  return true;
}

bool SharedLane::read(grpc::ByteBuffer* message) {
  const uint32_t number = in_.number;
  if (number == num_read_) return false;
  num_read_ = number;
  const size_t size = in_.size.load(std::memory_order_relaxed);
  const size_t offset = in_.offset.load(std::memory_order_relaxed);
  const size_t room = is_learner_ ? step_bytes_ : action_bytes_;
  if (offset >= kLine || size > room - kLine) {
    refuse("message", "shared memory: " + std::to_string(size) + " bytes at " +
                          std::to_string(offset) + ", and the room has " +
                          std::to_string(room));
  }
  uint8_t* const from = reinterpret_cast<uint8_t*>(memory_ + 1) +
                        (is_learner_ ? action_bytes_ : 0) + offset;
  const grpc::Slice slice(from, size, grpc::Slice::STATIC_SLICE);
  *message = grpc::ByteBuffer(&slice, 1);
  return true;
}

void SharedLane::wake() {
  in_.woken = 1;
  in_.ring();
}

void SharedLane::end() {
  out_.ended = 1;
  out_.ring();
}

bool SharedLane::has_ended() const { return in_.ended != 0; }

}  // namespace torchbeast
