#include "codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "sync.h"
#include "text.h"

namespace torchbeast {
namespace {

namespace io = google::protobuf::io;
using google::protobuf::internal::WireFormatLite;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "as the wire is");

// How protobuf begins a field: number and kind of encoding.
constexpr uint32_t number_tag(uint32_t field) { return field << 3; }
constexpr uint32_t bytes_tag(uint32_t field) { return field << 3 | 2; }

constexpr uint32_t kStepTag = bytes_tag(wire::EnvMessage::kStepFieldNumber);
constexpr uint32_t kActionTag = bytes_tag(wire::AgentMessage::kActionFieldNumber);
constexpr uint32_t kArraysTag = bytes_tag(wire::EnvStep::kArraysFieldNumber);
constexpr uint32_t kFinalTag = bytes_tag(wire::EnvStep::kFinalObservationFieldNumber);
constexpr uint32_t kTimeTag = number_tag(wire::EnvStep::kEnvNanosecondsFieldNumber);
constexpr uint32_t kNumberTag = number_tag(wire::EnvStep::kActionNumberFieldNumber);
static_assert(kArraysTag == bytes_tag(wire::AgentAction::kArraysFieldNumber));
static_assert(kNumberTag == number_tag(wire::AgentAction::kNumberFieldNumber));

size_t bytes_of(const std::vector<Array>& arrays) {
  size_t bytes = 0;
  for (const Array& array : arrays) bytes += array.num_bytes();
  return bytes;
}

// --- Writing -------------------------------------------------------------------------

// Bytes of a field's tag and length.
size_t header_size(size_t size) {
  return 1 + io::CodedOutputStream::VarintSize64(size);
}

uint8_t* write_number(uint64_t number, uint8_t* to) {
  return io::CodedOutputStream::WriteVarint64ToArray(number, to);
}

uint8_t* write_header(uint32_t tag, size_t size, uint8_t* to) {
  return write_number(size, write_number(tag, to));
}

// Adds a field, as protobuf does: one that is 0 is left out.
void add_number(uint32_t tag, uint64_t number, std::string* fields) {
  if (number == 0) return;
  uint8_t field[20];
  const uint8_t* const end = write_number(number, write_number(tag, field));
  fields->append(reinterpret_cast<const char*>(field),
                 static_cast<size_t>(end - field));
}

uint8_t* write_arrays(const std::vector<Array>& arrays, uint8_t* to) {
  for (const Array& array : arrays) {
    const size_t size = array.num_bytes();
    if (size > 0) std::memcpy(to, array.data(), size);
    to += size;
  }
  return to;
}

// A buffer of bytes in `block`, which it keeps as long as the transport needs it.
grpc::ByteBuffer share(const Array& block, uint8_t* data, size_t size) {
  struct Owner {
    std::shared_ptr<void> block;
    // The transport's threads take turns by its own locks, which ThreadSanitizer does
    // not see.
    std::atomic<bool> given{false};
  };
  auto owner = std::make_unique<Owner>();
  owner->block = block.owner();
  owner->given.store(true, std::memory_order_release);
  const auto let_go = [](void* pointer) {
    const std::unique_ptr<Owner> owner(static_cast<Owner*>(pointer));
    static_cast<void>(owner->given.load(std::memory_order_acquire));
  };
  const grpc::Slice slice(data, size, let_go, owner.release());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

RowMessage::RowMessage(uint32_t tag, const std::vector<Array>& arrays,
                       const std::vector<Array>& final_observation, std::string rest)
    : tag_(tag),
      arrays_(arrays),
      final_observation_(final_observation),
      rest_(std::move(rest)),
      size_(bytes_of(arrays)),
      final_size_(bytes_of(final_observation)),
      body_(header_size(size_) + size_ +
            (final_size_ > 0 ? header_size(final_size_) + final_size_ : 0) +
            rest_.size()) {}

size_t RowMessage::arrays_begin() const {
  return header_size(body_) + header_size(size_);
}

size_t RowMessage::num_bytes() const { return header_size(body_) + body_; }

void RowMessage::write(uint8_t* to) const {
  to = write_header(kArraysTag, size_, write_header(tag_, body_, to));
  to = write_arrays(arrays_, to);
  if (final_size_ > 0) {
    to = write_arrays(final_observation_, write_header(kFinalTag, final_size_, to));
  }
  std::memcpy(to, rest_.data(), rest_.size());
}

RowMessage step_message(const EnvRow& row) {
  std::string rest;
  add_number(kTimeTag, row.env_nanoseconds, &rest);
  add_number(kNumberTag, row.action_number, &rest);
  return {kStepTag, row.arrays, row.final_observation, std::move(rest)};
}

RowMessage action_message(const std::vector<Array>& action, uint64_t number,
                          bool with_layout) {
  static const std::vector<Array> none;
  std::string rest;
  add_number(kNumberTag, number, &rest);
  if (with_layout) {
    const ArraySpec spec = action.at(0).spec();
    wire::AgentAction more;
    more.mutable_layout()->set_dtype(static_cast<wire::DType>(spec.dtype));
    for (int64_t dim : spec.shape.tail()) {
      more.mutable_layout()->add_shape(static_cast<uint64_t>(dim));
    }
    rest += more.SerializeAsString();
  }
  return {kActionTag, action, none, std::move(rest)};
}

grpc::ByteBuffer encode(const RowMessage& message, MemoryPool& pool) {
  const size_t begin = kLine - message.arrays_begin(), size = message.num_bytes();
  const Array block =
      pool.allocate({DType::kUint8, Shape{static_cast<int64_t>(begin + size)}});
  message.write(block.data() + begin);
  return share(block, block.data() + begin, size);
}

grpc::ByteBuffer encode(const google::protobuf::MessageLite& message) {
  const size_t size = message.ByteSizeLong();
  if (size > static_cast<size_t>(kMaxHelloBytes)) {
    throw WireError("hello: " + std::to_string(size) + " bytes, at most " +
                    std::to_string(kMaxHelloBytes) +
                    " are allowed; give one bound for a whole Box if all elements have "
                    "the same");
  }
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

grpc::ByteBuffer encode_error(const std::string& text) {
  constexpr size_t kMaxText = 64 << 10;
  wire::EnvError error;
  std::string& sent = *error.mutable_message();
  sent = shortened(text, kMaxText);
  // Protobuf knows what is UTF-8.
  if (!wire::EnvError().ParseFromString(error.SerializeAsString())) {
    for (char& c : sent) {
      if ((c & 0x80) != 0) c = '?';
    }
  }
  wire::EnvMessage message;
  *message.mutable_error() = std::move(error);
  return encode(message);
}

// --- Reading -------------------------------------------------------------------------

namespace {

[[noreturn]] void malformed() {
  throw WireError("malformed message: it is none that torchbeast.proto describes");
}

// The size of a message, if it has at most `most` bytes.
int checked_size(const grpc::ByteBuffer& message, int64_t most) {
  if (!message.Valid()) refuse("message", "no bytes at all");
  if (message.Length() > static_cast<size_t>(most)) {
    refuse("message", std::to_string(message.Length()) + " bytes, at most " +
                          std::to_string(most) + " are allowed");
  }
  return static_cast<int>(message.Length());
}

// The length of the field whose tag has been read; its bytes are there.
int read_length(io::CodedInputStream& in) {
  int length;
  if (!in.ReadVarintSizeAsInt(&length) || length > in.BytesUntilLimit()) malformed();
  return length;
}

template <typename Message>
Message parse(grpc::ByteBuffer* buffer, int64_t most = kMaxHelloBytes) {
  checked_size(*buffer, most);
  grpc::Slice slice;
  if (!buffer->DumpToSingleSlice(&slice).ok()) malformed();
  // A copy: the sender may still write in a lane's memory.
  const std::string bytes(slice.begin(), slice.end());
  // One at a time: of what breaks the rules, protobuf may make 40 times the bytes.
  static Mutex mutex;
  MutexLock lock(mutex);
  Message message;
  if (!message.ParseFromString(bytes)) malformed();
  return message;
}

// Other numbers than 0 and 1 are undefined behaviour in NumPy and torch.
bool are_bools(const uint8_t* data, size_t size) {
  uint8_t bits = 0;
  for (size_t i = 0; i < size; ++i) bits |= data[i];
  return bits <= 1;
}

void check_size(int size, size_t wanted, const char* what) {
  if (static_cast<size_t>(size) == wanted) return;
  refuse(what, std::to_string(size) + " bytes, and the spaces of the hello make " +
                   std::to_string(wanted));
}

// Reads a field of `size` bytes.
void read_arrays(io::CodedInputStream& in, int size, const std::vector<Array>& arrays,
                 const char* what) {
  check_size(size, bytes_of(arrays), what);
  for (const Array& array : arrays) {
    const size_t bytes = array.num_bytes();
    if (!in.ReadRaw(array.data(), static_cast<int>(bytes))) malformed();
    if (array.dtype() == DType::kBool && !are_bools(array.data(), bytes)) {
      refuse(what, "a BOOL of " + array.spec().to_string() + " is neither 0 nor 1");
    }
  }
}

// Reads a message whose only field is `only`, an EnvStep or an AgentAction: its arrays
// with take_arrays(in, size), once at least, and all else with read_field(in, tag),
// which returns false for what is to be skipped. Returns false if the message begins
// with another field.
template <typename F, typename G>
bool read_message(grpc::ByteBuffer* message, uint32_t only, const F& take_arrays,
                  const G& read_field) {
  const int size = checked_size(*message, kMaxMessageBytes);
  grpc::ProtoBufferReader buffer(message);
  io::CodedInputStream in(&buffer);
  in.PushLimit(size);
  if (in.ReadTag() != only) return false;
  if (read_length(in) != in.BytesUntilLimit()) malformed();
  bool has_arrays = false;
  while (in.BytesUntilLimit() > 0) {
    const uint32_t tag = in.ReadTag();
    if (tag == kArraysTag) {
      take_arrays(in, read_length(in));
      has_arrays = true;
    } else if (!read_field(in, tag) && !WireFormatLite::SkipField(&in, tag)) {
      malformed();
    }
  }
  if (!has_arrays) take_arrays(in, 0);
  return true;
}

// Of a message that is neither a step nor an action.
template <typename Message>
[[noreturn]] void refuse_message(const Message& message, const char* what) {
  throw WireError(message.has_hello() ? "a second hello" : what);
}

}  // namespace

wire::EnvMessage decode_env_message(grpc::ByteBuffer* message) {
  return parse<wire::EnvMessage>(message);
}

wire::AgentMessage decode_agent_message(grpc::ByteBuffer* message) {
  return parse<wire::AgentMessage>(message);
}

std::optional<std::string> decode_step(grpc::ByteBuffer* message,
                                       const StreamSpec& spec, MemoryPool& pool,
                                       EnvRow* row) {
  // The first arrays of a step, once their size is right.
  const auto make = [&](size_t count, size_t bytes, int size, const char* what) {
    check_size(size, bytes, what);
    std::vector<Array> arrays;
    for (size_t i = 0; i < count; ++i) arrays.push_back(pool.allocate(spec.arrays[i]));
    return arrays;
  };
  const auto read_step = [&](io::CodedInputStream& in, int size) {
    if (row->arrays.empty()) {
      row->arrays = make(spec.arrays.size(), spec.step_bytes, size, "step");
    }
    read_arrays(in, size, row->arrays, "step");
  };
  const auto read_field = [&](io::CodedInputStream& in, uint32_t tag) {
    if (tag == kFinalTag) {
      row->final_observation.clear();
      const int size = read_length(in);
      if (size == 0) return true;
      row->final_observation = make(spec.num_observation_arrays, spec.observation_bytes,
                                    size, "final_observation");
      read_arrays(in, size, row->final_observation, "final_observation");
    } else if (tag == kTimeTag) {
      if (!in.ReadVarint64(&row->env_nanoseconds)) malformed();
    } else if (tag == kNumberTag) {
      if (!in.ReadVarint64(&row->action_number)) malformed();
    } else {
      return false;
    }
    return true;
  };
  if (read_message(message, kStepTag, read_step, read_field)) return std::nullopt;
  wire::EnvMessage other = decode_env_message(message);
  if (!other.has_error()) refuse_message(other, "message: neither a step nor an error");
  return std::move(*other.mutable_error()->mutable_message());
}

uint64_t decode_action(grpc::ByteBuffer* message, const std::vector<Array>& action) {
  uint64_t number = 0;
  const auto read_action = [&](io::CodedInputStream& in, int size) {
    read_arrays(in, size, action, "action");
  };
  const auto read_field = [&number](io::CodedInputStream& in, uint32_t tag) {
    if (tag != kNumberTag) return false;
    if (!in.ReadVarint64(&number)) malformed();
    return true;
  };
  if (read_message(message, kActionTag, read_action, read_field)) return number;
  refuse_message(decode_agent_message(message), "message: no action");
}

uint64_t decode_action_with_layout(grpc::ByteBuffer* message, int64_t num_envs,
                                   MemoryPool& pool, std::vector<Array>* action) {
  const auto parsed = parse<wire::AgentMessage>(message, kMaxLayoutBytes);
  if (!parsed.has_action()) refuse_message(parsed, "message: no action");
  const std::string& bytes = parsed.action().arrays();
  const ArraySpec spec = layout_spec(parsed.action().layout(), num_envs);
  if (bytes.size() != spec.num_bytes()) {
    refuse("action", std::to_string(bytes.size()) + " bytes, and its layout, " +
                         spec.to_string() + ", makes " +
                         std::to_string(spec.num_bytes()));
  }
  *action = {pool.allocate(spec)};
  if (!bytes.empty()) std::memcpy(action->at(0).data(), bytes.data(), bytes.size());
  if (spec.dtype == DType::kBool && !are_bools(action->at(0).data(), bytes.size())) {
    refuse("action", "a BOOL is neither 0 nor 1");
  }
  return parsed.action().number();
}

}  // namespace torchbeast
