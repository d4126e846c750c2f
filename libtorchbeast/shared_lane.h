// Messages through memory that an environment and its learner share.
//
// The messages are those of a stream, see proto/torchbeast.proto, and so are the rules:
// each side sends one and waits for the answer. The stream stays open. It says that a
// side has gone, and why; nothing that ends a stream comes through the lane.
//
// The environment's side makes the memory and describes it in its hello; the learner's
// side opens it, or does not: then the stream carries all messages.

#pragma once

#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "codec.h"
#include "shared_pages.h"
#include "stream_spec.h"
#include "sync.h"
#include "torchbeast.pb.h"

namespace torchbeast {

// One side of a lane. One thread at a time, but for wake(), which is thread-safe.
// Messages that were read keep their bytes only until the next write().
class SharedLane {
 public:
  // The environment's side, which rings the learner's `doorbell`. Null if there is no
  // such memory, here or there, or if actions may have any size.
  static std::unique_ptr<SharedLane> make(const StreamSpec& spec,
                                          const wire::SharedMemory& doorbell);
  // The learner's. Null unless an environment of this machine and user has made it, for
  // this spec.
  static std::unique_ptr<SharedLane> open(const StreamSpec& spec,
                                          const wire::SharedMemory& description);
  ~SharedLane();  // ends this side
  SharedLane(const SharedLane&) = delete;

  // How the learner finds the memory, until close_file().
  wire::SharedMemory description() const { return pages_->description(); }
  void close_file() { pages_->close_file(); }

  // Whether the message fits.
  bool write(const grpc::ByteBuffer& message);
  bool write(const RowMessage& message);
  // If it is true, the next read() has a message, whatever the other side writes.
  bool has_message();
  // Whether there was a message.
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
  struct Sizes;
  // Messages in one direction, as one side reads or writes them.
  struct Way {
    Direction& state;
    Bell& bell;  // of who reads it
    uint8_t* const room;
    const size_t num_bytes;  // of the room
    uint32_t number = 0;     // of the last message
  };
  static Sizes sizes(const StreamSpec& spec);
  SharedLane(std::unique_ptr<SharedPages> pages, std::unique_ptr<SharedPages> doorbell,
             const Sizes& sizes);
  // REQUIRES: pages_ and doorbell_ are there.
  Way make_way(bool to_learner, const Sizes& sizes) const;
  // Where the next message begins; null if it does not fit.
  uint8_t* begin_message(size_t size, size_t offset);
  void send();

  const std::unique_ptr<SharedPages> pages_;
  const std::unique_ptr<SharedPages> doorbell_;  // the environment's view of it
  Way in_, out_;
  bool has_message_ = false;  // that was not read
};

}  // namespace torchbeast
