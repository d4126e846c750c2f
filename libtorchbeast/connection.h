// One stream, seen from either side.

#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "codec.h"
#include "environment.h"
#include "shared_lane.h"
#include "sockets.h"
#include "sync.h"
#include "torchbeast.pb.h"
#include "transport.h"

namespace torchbeast {

// An environment on the other side has raised; with its traceback, which the other side
// should have cut, and may not.
class EnvironmentError : public Ended {
 public:
  explicit EnvironmentError(const std::string& message)
      : Ended(End::kRaised, printable(shortened(message, 8192))) {}
};

// One thread at a time, but for cancel(), restart_waiting() and cancel_if_slow(), which
// are thread-safe.
//
// A read or write never ends by itself if the other side is silent: who owns the
// connection, or watches it, calls cancel() or cancel_if_slow(), and it throws then.
//
// The collector calls has_message(), is_ready() and needs_look() for a session that no
// thread has claimed, with the session's lock held. All else is for the thread that has
// claimed it, see collector.cc.
class Connection {
 public:
  virtual ~Connection() = default;
  Connection(const Connection&) = delete;

  // Throw TransportError if the stream is lost or cancelled, RefusedError if the other
  // side says no, and read() Ended if it has ended its side without an error.
  void write(const grpc::ByteBuffer& message);
  void write(const RowMessage& message, MemoryPool& pool);
  void read(grpc::ByteBuffer* message);

  // The learner's side of the handshake: says hello, returns the environment's. Throws
  // as read(), RefusedError if it speaks another version, WireError if it breaks a
  // rule, EnvironmentError. Messages may go through shared memory from here on, see
  // shared_lane.h, if `takes_memory` and both sides are on one machine.
  wire::EnvHello shake_hands(const std::optional<wire::Seeding>& seeding,
                             bool takes_memory = false);
  // The environment's side: returns the learner's hello. Throws as read(), RefusedError
  // if it speaks another version, WireError.
  wire::AgentHello expect_agent_hello();
  // Answers it. Shared memory is offered if the learner takes it, and `offers_memory`.
  void introduce(wire::EnvHello hello, bool offers_memory = true);

  // Makes a read or write fail that waits or is to come, with this reason, which must
  // stay.
  void cancel(const char* reason);
  // Counts the time of a wait in progress anew.
  void restart_waiting();
  // Cancels if a read or write has been waiting for so long.
  void cancel_if_slow(Milliseconds limit, const char* reason);
  bool is_cancelled() const { return cancel_reason_ != nullptr; }
  // Whether messages go through shared memory.
  bool has_lane() const { return lane_ != nullptr; }
  // Whether the other side owes its hello, or its end. For all else it may take longer.
  // Thread-safe.
  bool is_shaking_hands() const { return is_shaking_hands_; }

  // For messages: "the environment server at unix:/tmp/polybeast.0".
  const std::string& peer() const { return peer_; }
  // For counts: the dialled address, or the machine of a peer that has connected. Unix
  // sockets do not say more than "unix:", which is this machine.
  const std::string& origin() const { return origin_; }

  // --- REQUIRES: has_lane()

  // From now on until the next read() this side waits.
  void start_waiting() { waiting_since_ = Clock::now().time_since_epoch().count(); }
  // Whether read() would not block.
  bool has_message() const { return owned_lane_->has_message(); }
  // Whether there is a message, or the other side sends none any more.
  bool is_ready() const { return has_message() || owned_lane_->has_ended(); }
  // Whether read() has to look at the stream for the reason why no message comes.
  bool needs_look() const {
    return owned_lane_->has_ended() || is_cancelled() || is_gone();
  }

 protected:
  Connection(std::string peer, std::string origin)
      : peer_(std::move(peer)), origin_(std::move(origin)) {}

  // As long as this lives, the stream waits for the other side.
  auto wait() {
    start_waiting();
    return AtEnd([this] { waiting_since_ = 0; });
  }
  void shake_hands_again() { is_shaking_hands_ = true; }
  // Null if nobody has cancelled.
  const char* cancel_reason() const { return cancel_reason_; }
  // This side sends nothing more through shared memory.
  void end_lane();

 private:
  // Whether both sides are on one machine.
  bool is_local() const { return origin_.compare(0, 5, "unix:") == 0; }
  // Whether the other side is no longer there, without asking it for anything.
  virtual bool is_gone() const = 0;
  bool read_lane(grpc::ByteBuffer* message);
  void use(std::unique_ptr<SharedLane> lane);
  virtual bool do_write(const grpc::ByteBuffer& message) = 0;
  virtual bool do_read(grpc::ByteBuffer* message) = 0;
  virtual void do_cancel() = 0;
  // Says why a read (else a write) has failed.
  [[noreturn]] virtual void throw_reason(bool reading) = 0;

  const std::string peer_;
  const std::string origin_;
  std::atomic<int64_t> waiting_since_{0};  // ticks of Clock; 0: not waiting
  std::atomic<const char*> cancel_reason_{nullptr};
  std::atomic<bool> is_shaking_hands_{true};
  std::optional<wire::SharedMemory> doorbell_;  // the learner's
  std::unique_ptr<SharedLane> owned_lane_;
  std::atomic<SharedLane*> lane_{nullptr};  // for cancel(), of another thread
};

// Opened by this process: the learner connects to an environment server, or an
// environment to the learner.
class DialledConnection : public Connection {
 public:
  // Throws std::invalid_argument if `security` does not suffice. `peer` goes before the
  // address in messages.
  DialledConnection(const Address& address, const Security& security,
                    const char* method, const std::string& peer);
  ~DialledConnection() override;

  // Connects; may be cancelled already. Throws TransportError if nobody listens at a
  // unix socket, or another user.
  void open();

  // Ends this side without an error and waits for the end of the other. Throws as
  // read().
  void leave();
  // Sends what the environment has raised, and leaves. A lost connection is no error,
  // nor one that was never there.
  void leave_with_error(const std::string& text);

 private:
  bool do_write(const grpc::ByteBuffer& message) override;
  bool do_read(grpc::ByteBuffer* message) override;
  void do_cancel() override;
  [[noreturn]] void throw_reason(bool reading) override;
  [[noreturn]] void throw_end(const grpc::Status& status);

  bool is_gone() const override;
  // Reads what was on its way, and returns how the other side has ended the stream.
  grpc::Status finish();

  const Address address_;
  const Security security_;
  const char* const method_;
  Descriptor socket_{-1};  // a second one, to see that the other side has gone
  std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  std::unique_ptr<DialledStream> stream_;
  bool finished_ = false;
};

// By the other side. Lives in the thread of its stream's handler, and owns neither.
class ServedConnection : public Connection {
 public:
  // `peer` goes before the address in messages.
  ServedConnection(grpc::ServerContext* context, ServedStream* stream,
                   const std::string& peer);

  Activity activity{nullptr};  // of its environment

  // Without asking the other side for anything.
  bool is_gone() const override { return context_.IsCancelled(); }

 private:
  bool do_write(const grpc::ByteBuffer& message) override;
  bool do_read(grpc::ByteBuffer* message) override;
  void do_cancel() override;
  [[noreturn]] void throw_reason(bool reading) override;

  grpc::ServerContext& context_;
  ServedStream& stream_;
};

}  // namespace torchbeast
