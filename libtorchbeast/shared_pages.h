// Memory that two processes of one machine and one user share, and bells in it.
//
// It has no name in any folder, so nothing is left behind, however a process ends. The
// other side can write anywhere in it at any time: what is read from it is read once,
// and checked afterwards. Only Linux has such memory.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "sockets.h"
#include "sync.h"
#include "torchbeast.pb.h"

namespace torchbeast {

// Owns a mapping of the memory. Thread-safe.
class SharedPages {
 public:
  // Zeros. Null if the system has no such memory, or not so much.
  static std::unique_ptr<SharedPages> make(size_t num_bytes);
  // Null unless a process of this machine, and of this user, has made what is described
  // there, with this size.
  static std::unique_ptr<SharedPages> open(const wire::SharedMemory& description,
                                           size_t num_bytes);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;

  uint8_t* data() const;  // begins a cache line
  // How another process finds it. REQUIRES: made here, and close_file() was not called.
  wire::SharedMemory description() const;
  // No other process can find it any more.
  void close_file() { file_ = Descriptor(-1); }

 private:
  SharedPages(Descriptor file, uint8_t* memory, size_t num_bytes)
      : file_(std::move(file)), memory_(memory), num_bytes_(num_bytes) {}

  Descriptor file_;        // -1: closed
  uint8_t* const memory_;  // begins with the nonce
  const size_t num_bytes_;
};

// Wakes threads that wait in another process, or here. Lies in shared pages. Who rings
// always asks the system to wake them: peers could overwrite a note that nobody waits.
class Bell {
 public:
  void ring();
  uint32_t count() const { return count_; }
  // Returns once the bell has rung since count() was `before`, or after `limit`. It may
  // return earlier.
  void wait(uint32_t before, Milliseconds limit);

 private:
  std::atomic<uint32_t> count_;
};

// What the environments of all streams with a lane ring when there is something for a
// learner of this process. Null if the system has no shared pages.
SharedPages* doorbell_pages();
inline Bell& bell_in(const SharedPages& pages) {
  return *reinterpret_cast<Bell*>(pages.data());
}

}  // namespace torchbeast
