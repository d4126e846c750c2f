#include "connection.h"

#include <grpc/grpc.h>
#include <poll.h>

#include <utility>

#include "codec.h"
#include "stream_spec.h"

namespace torchbeast {

namespace {

void check_version(uint32_t version, const std::string& peer) {
  if (version == kWireVersion) return;
  throw RefusedError(peer + " speaks version " + std::to_string(version) +
                     " of the protocol, and this side version " +
                     std::to_string(kWireVersion) +
                     "; install the same torchbeast on both sides, and adapt your own "
                     "clients to its torchbeast.proto");
}

// The environment's hello, which keeps the rules.
wire::EnvHello decode_env_hello(grpc::ByteBuffer* message, const std::string& peer) {
  wire::EnvMessage answer = decode_env_message(message);
  if (answer.has_error()) {
    throw EnvironmentError(peer + " failed:\n" + answer.error().message());
  }
  if (!answer.has_hello()) throw WireError("a step before the hello");
  check_version(answer.hello().version(), peer);
  StreamSpec{answer.hello()};
  return std::move(*answer.mutable_hello());
}

}  // namespace

// --- What both have in common

void Connection::write(const grpc::ByteBuffer& message) {
  const auto waiting = wait();
  if (!(lane_ != nullptr ? owned_lane_->write(message) : do_write(message))) {
    throw_reason(false);
  }
}

void Connection::write(const RowMessage& message, MemoryPool& pool) {
  if (lane_ == nullptr) return write(encode(message, pool));
  if (!owned_lane_->write(message)) throw_reason(false);
}

void Connection::read(grpc::ByteBuffer* message) {
  const auto waiting = wait();
  if (!(lane_ != nullptr ? read_lane(message) : do_read(message))) throw_reason(true);
}

bool Connection::read_lane(grpc::ByteBuffer* message) {
  SharedLane& lane = *owned_lane_;
  while (!lane.read(message)) {
    // The stream says why.
    if (needs_look()) return do_read(message);
    lane.wait(kInterruptPeriod);
  }
  return true;
}

void Connection::use(std::unique_ptr<SharedLane> lane) {
  owned_lane_ = std::move(lane);
  lane_ = owned_lane_.get();
}

void Connection::end_lane() {
  if (owned_lane_ != nullptr) owned_lane_->end();
}

wire::EnvHello Connection::shake_hands(const std::optional<wire::Seeding>& seeding,
                                       bool takes_memory) {
  wire::AgentMessage hello;
  hello.mutable_hello()->set_version(kWireVersion);
  takes_memory = takes_memory && is_local() && doorbell_pages() != nullptr;
  if (takes_memory) {
    *hello.mutable_hello()->mutable_doorbell() = doorbell_pages()->description();
  }
  if (seeding) *hello.mutable_hello()->mutable_seeding() = *seeding;
  write(encode(hello));
  grpc::ByteBuffer message;
  read(&message);
  wire::EnvHello env = decode_env_hello(&message, peer_);
  if (env.has_shared_memory()) {
    std::unique_ptr<SharedLane> lane;
    if (takes_memory) lane = SharedLane::open(StreamSpec(env), env.shared_memory());
    wire::AgentMessage choice;
    choice.set_shared_memory(lane != nullptr);
    write(encode(choice));
    use(std::move(lane));
    env.clear_shared_memory();  // it differs for each stream
  }
  is_shaking_hands_ = false;
  return env;
}

wire::AgentHello Connection::expect_agent_hello() {
  grpc::ByteBuffer message;
  read(&message);
  wire::AgentMessage answer = decode_agent_message(&message);
  if (!answer.has_hello()) throw WireError("an action before the hello");
  check_version(answer.hello().version(), peer_);
  if (is_local() && answer.hello().has_doorbell()) {
    doorbell_ = answer.hello().doorbell();
  }
  is_shaking_hands_ = false;
  return std::move(*answer.mutable_hello());
}

void Connection::introduce(wire::EnvHello hello, bool offers_memory) {
  std::unique_ptr<SharedLane> lane;
  if (doorbell_ && offers_memory) {
    lane = SharedLane::make(StreamSpec(hello), *doorbell_);
  }
  wire::EnvMessage message;
  *message.mutable_hello() = std::move(hello);
  if (lane == nullptr) return write(encode(message));
  *message.mutable_hello()->mutable_shared_memory() = lane->description();
  shake_hands_again();
  write(encode(message));
  grpc::ByteBuffer answer;
  read(&answer);
  const wire::AgentMessage choice = decode_agent_message(&answer);
  if (choice.kind_case() != wire::AgentMessage::kSharedMemory) {
    throw WireError("no answer to the shared memory that was offered");
  }
  is_shaking_hands_ = false;
  lane->close_file();
  if (choice.shared_memory()) use(std::move(lane));
}

void Connection::cancel(const char* reason) {
  const char* none = nullptr;
  cancel_reason_.compare_exchange_strong(none, reason);
  do_cancel();
  if (SharedLane* const lane = lane_) lane->wake();
}

void Connection::restart_waiting() {
  int64_t since = waiting_since_;
  const int64_t now = Clock::now().time_since_epoch().count();
  if (since != 0) waiting_since_.compare_exchange_strong(since, now);
}

void Connection::cancel_if_slow(Milliseconds limit, const char* reason) {
  const int64_t since = waiting_since_;
  if (since == 0) return;
  const Clock::time_point start{Clock::duration(since)};
  if (is_longer(Clock::now() - start, limit)) cancel(reason);
}

// --- Dialled

DialledConnection::DialledConnection(const Address& address, const Security& security,
                                     const char* method, const std::string& peer)
    : Connection(peer + " at " + address.to_string(), address.to_string()),
      address_(address),
      security_(security),
      method_(method) {
  client_credentials(address_, security_);  // checks both
  if (!security.token.empty()) {
    context_.AddMetadata("authorization", "Bearer " + security.token);
  }
}

DialledConnection::~DialledConnection() {
  end_lane();
  context_.TryCancel();
  if (stream_ != nullptr && !finished_) stream_->Finish();
}

void DialledConnection::open() {
  const auto waiting = wait();
  channel_ = make_channel(address_, security_, &socket_);
  stream_ = open_stream(channel_.get(), &context_, method_);
  if (!address_.is_unix()) dialled_connections().add_dialled();
}

void DialledConnection::leave_with_error(const std::string& text) {
  if (stream_ == nullptr || finished_) return;
  shake_hands_again();
  try {
    write(encode_error(text));
    leave();
  } catch (const Ended&) {
  }
}

void DialledConnection::leave() {
  shake_hands_again();
  const auto waiting = wait();
  end_lane();
  stream_->WritesDone();
  const grpc::Status status = finish();
  if (!status.ok()) throw_end(status);
}

grpc::Status DialledConnection::finish() {
  grpc::ByteBuffer message;
  while (stream_->Read(&message)) {
  }
  finished_ = true;
  return stream_->Finish();
}

bool DialledConnection::do_write(const grpc::ByteBuffer& message) {
  return stream_->Write(message);
}

bool DialledConnection::do_read(grpc::ByteBuffer* message) {
  if (!stream_->Read(message)) return false;
  if (is_shaking_hands()) dialled_connections().welcome(context_.peer());
  return true;
}

void DialledConnection::do_cancel() { context_.TryCancel(); }

bool DialledConnection::is_gone() const {
#ifdef POLLRDHUP
  constexpr short kHungUp = POLLRDHUP;
#else  // there are no lanes, either
  constexpr short kHungUp = POLLHUP;
#endif
  pollfd socket{socket_.get(), kHungUp, 0};
  return poll(&socket, 1, 0) > 0;
}

void DialledConnection::throw_reason(bool) { throw_end(finish()); }

void DialledConnection::throw_end(const grpc::Status& status) {
  const char* reason = cancel_reason();
  if (reason != nullptr) throw TransportError(peer() + " " + reason);
  if (status.ok() && method_ == kJoinMethod) {
    throw Ended(End::kFinished, peer() + " has completed its run");
  }
  if (status.ok()) throw TransportError(peer() + " has ended the stream");
  if (meaning_of(status.error_code()) == End::kRefused) {
    throw RefusedError(peer() + " refuses: " + status.error_message());
  }
  throw TransportError(peer() + " is lost: " + status.error_message());
}

// --- Served

namespace {

// Unix sockets have no addresses, so connections have numbers.
std::string place_of(const grpc::ServerContext& context) {
  const std::string address = context.peer();
  if (address.compare(0, 3, "fd:") != 0) return address;
  static std::atomic<uint64_t> number{0};
  return "this machine (connection " + std::to_string(++number) + ")";
}

// "ipv4:10.0.0.1:50000" without the port, which each connection has anew. All unix
// sockets are one machine: gRPC calls their peers "fd:" and a number, by chance.
std::string machine_of(const grpc::ServerContext& context) {
  const std::string address = context.peer();
  const bool is_tcp = address.compare(0, 2, "ip") == 0;
  return is_tcp ? address.substr(0, address.rfind(':')) : "unix:";
}

}  // namespace

ServedConnection::ServedConnection(grpc::ServerContext* context, ServedStream* stream,
                                   const std::string& peer)
    : Connection(peer + " " + place_of(*context), machine_of(*context)),
      context_(*context),
      stream_(*stream) {}

bool ServedConnection::do_write(const grpc::ByteBuffer& message) {
  return stream_.Write(message);
}

bool ServedConnection::do_read(grpc::ByteBuffer* message) {
  return stream_.Read(message);
}

// As TryCancel(), but the other side gets the reason.
void ServedConnection::do_cancel() {
  const std::string text = peer() + " " + cancel_reason();
  const auto status =
      cancel_reason() == kRunIsComplete ? GRPC_STATUS_OK : GRPC_STATUS_UNAVAILABLE;
  grpc_call_cancel_with_status(context_.c_call(), status, text.c_str(), nullptr);
}

void ServedConnection::throw_reason(bool reading) {
  const char* reason = cancel_reason();
  if (reason == kRunIsComplete) throw_over();
  if (reason != nullptr) throw TransportError(peer() + " " + reason);
  if (reading && !is_gone()) throw Ended(End::kLeft, peer() + " has left");
  throw TransportError(peer() + " is lost");
}

}  // namespace torchbeast
