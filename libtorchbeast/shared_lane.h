// Messages through memory that two processes of one machine share.
//
// The messages are those of a stream, see proto/torchbeast.proto, and so are the rules:
// each side sends one and waits for the answer. The stream stays open. It says that a
// side has gone, and why; nothing that ends a stream comes through the lane.
//
// The environment's side makes the memory and describes it in its hello; the learner's
// side opens it, or does not: then the stream carries all messages. The memory has no
// name in any folder, so nothing is left behind, however a process ends. Only Linux has
// lanes.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "codec.h"
#include "sync.h"
#include "torchbeast.pb.h"

namespace torchbeast {

// One side of a lane. One thread at a time, but for wake(), which is thread-safe.
//
// The other side can write anywhere in the memory at any time. So what it says is read
// once, and checked afterwards; messages keep their bytes only until the next write().
class SharedLane {
 public:
  // Room for messages of so many bytes in each direction. Null if the system has no
  // such memory.
  static std::unique_ptr<SharedLane> make(size_t action_bytes, size_t step_bytes);
  // Null unless a process of this machine, and of this user, has made what is described
  // there.
  static std::unique_ptr<SharedLane> open(const wire::SharedMemory& description);
  ~SharedLane();  // ends this side
  SharedLane(const SharedLane&) = delete;

  // How the other side finds the memory. REQUIRES: make() has made it, and close_file()
  // was not called.
  wire::SharedMemory description() const;
  // The other side has opened it, or does not want to.
  void close_file();

  // Whether the message fits.
  bool write(const grpc::ByteBuffer& message);
  bool write(const RowMessage& message);
  // Whether there was a message. It shares the memory of the lane until write().
  bool read(grpc::ByteBuffer* message);
  // Waits until there is a message, the other side ends or wake() is called, but not
  // longer than `limit`.
  void wait(Milliseconds limit);
  void wake();
  // This side writes no more.
  void end();
  // The other side writes no more.
  bool has_ended() const;

 private:
  struct Direction;
  struct Memory;
  SharedLane(int file, Memory* memory, size_t num_bytes, size_t action_bytes,
             size_t step_bytes, bool is_learner);

  // Where the message of this side begins; null if it does not fit.
  uint8_t* begin_message(size_t size, size_t offset);
  void send();

  int file_;  // -1: closed
  Memory* const memory_;
  const size_t num_bytes_;
  const size_t action_bytes_, step_bytes_;
  const bool is_learner_;
  Direction& in_;
  Direction& out_;
  uint32_t num_read_ = 0;
  uint32_t num_written_ = 0;
};

}  // namespace torchbeast
