#include "shared_pages.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <random>
#include <string>
#include <string_view>
#include <utility>

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
constexpr size_t kHeaderBytes = 64;  // the nonce, up to the end of its cache line
}  // namespace

uint8_t* SharedPages::data() const { return memory_ + kHeaderBytes; }

void Bell::ring() {
  ++count_;
#if defined(__linux__)
  syscall(SYS_futex, &count_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

#if defined(__linux__)

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint8_t* map(int file, size_t num_bytes) {
  void* const memory =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, num_bytes, MADV_DONTFORK);  // a child must not take part
  return static_cast<uint8_t*>(memory);
}

// Whether it is memory of this user that nobody can make shorter.
bool is_sound(int file, size_t num_bytes) {
  struct stat about {};
  const int seals = fcntl(file, F_GET_SEALS);
  return fstat(file, &about) == 0 && about.st_uid == geteuid() && seals != -1 &&
         (seals & kSeals) == kSeals && about.st_size == static_cast<off_t>(num_bytes);
}

}  // namespace

std::unique_ptr<SharedPages> SharedPages::make(size_t num_bytes) {
  num_bytes += kHeaderBytes;
  Descriptor file(memfd_create("torchbeast", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return nullptr;
  // The pages are taken now: later, a lack of them would end the process. So would an
  // access after the other side has made the file shorter, which the seals forbid.
  int refused = EINTR;
  while (refused == EINTR) {
    refused = posix_fallocate(file.get(), 0, static_cast<off_t>(num_bytes));
  }
  if (refused != 0 || fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) return nullptr;
  uint8_t* const memory = map(file.get(), num_bytes);
  if (memory == nullptr) return nullptr;
  std::random_device random;
  for (size_t i = 0; i < kNonceBytes; ++i) memory[i] = static_cast<uint8_t>(random());
  return std::unique_ptr<SharedPages>(
      new SharedPages(std::move(file), memory, num_bytes));
}

std::unique_ptr<SharedPages> SharedPages::open(const wire::SharedMemory& description,
                                               size_t num_bytes) {
  num_bytes += kHeaderBytes;
  if (description.nonce().size() != kNonceBytes) return nullptr;
  // In another container, there may be another process of this number, or none.
  const std::string path = "/proc/" + std::to_string(description.process()) + "/fd/" +
                           std::to_string(description.file());
  // No other file is touched: it could wait, as on a network, or act. Reading the link
  // asks no file system.
  constexpr std::string_view kMemory = "/memfd:";
  char target[kMemory.size()];
  const ssize_t size = readlink(path.c_str(), target, sizeof(target));
  if (size < 0 || std::string_view(target, static_cast<size_t>(size)) != kMemory) {
    return nullptr;
  }
  const Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!is_sound(file.get(), num_bytes)) return nullptr;
  uint8_t* const memory = map(file.get(), num_bytes);
  if (memory == nullptr) return nullptr;
  std::unique_ptr<SharedPages> pages(
      new SharedPages(Descriptor(-1), memory, num_bytes));
  if (std::memcmp(memory, description.nonce().data(), kNonceBytes) != 0) return nullptr;
  return pages;
}

SharedPages::~SharedPages() { munmap(memory_, num_bytes_); }

wire::SharedMemory SharedPages::description() const {
  wire::SharedMemory description;
  description.set_process(static_cast<uint32_t>(getpid()));
  description.set_file(static_cast<uint32_t>(file_.get()));
  description.set_nonce(memory_, kNonceBytes);
  return description;
}

void Bell::wait(uint32_t before, Milliseconds limit) {
  const auto ms = std::clamp(limit, Milliseconds(0), Milliseconds(1000)).count();
  const timespec time{ms / 1000, ms % 1000 * 1'000'000};
  syscall(SYS_futex, &count_, FUTEX_WAIT, before, &time, nullptr, 0);
}

#else

std::unique_ptr<SharedPages> SharedPages::make(size_t) { return nullptr; }
std::unique_ptr<SharedPages> SharedPages::open(const wire::SharedMemory&, size_t) {
  return nullptr;
}
SharedPages::~SharedPages() = default;
wire::SharedMemory SharedPages::description() const { return {}; }
void Bell::wait(uint32_t, Milliseconds) {}

#endif

SharedPages* doorbell_pages() {
  // Never destroyed: threads may still ring while the process ends.
  static SharedPages* const pages = SharedPages::make(sizeof(Bell)).release();
  return pages;
}

}  // namespace torchbeast
