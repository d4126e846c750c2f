// Writes and reads the messages of proto/torchbeast.proto.
//
// Handshakes and errors are written and read by protobuf's generated classes. These
// would copy a step's arrays once more on each side. So a step or an action, whose
// message is little more than one field of bytes, is copied from its arrays into the
// transport's memory and from the transport's memory into arrays.
//
// A peer's message is read, or refused with a WireError: its length is compared with
// the announced one before any byte is read.

#pragma once

#include <google/protobuf/message_lite.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "stream_spec.h"

namespace torchbeast {

// A wire::EnvMessage or wire::AgentMessage with a hello. Throws WireError if it is too
// large. StreamSpec checks a hello's rules.
grpc::ByteBuffer encode(const google::protobuf::MessageLite& message);
// An EnvMessage with an error. Any text can be sent: if it is long, its middle is left
// out; if it is not UTF-8, all but its ASCII characters become "?".
grpc::ByteBuffer encode_error(const std::string& text);

// A step or an action that is to be written: a message whose only field is an EnvStep
// or an AgentAction. Its first array should begin a cache line: copying it then takes a
// sixth less time. REQUIRES: the arrays live as long, and are as a StreamSpec says.
class RowMessage {
 public:
  // See below. `rest`: the fields behind the arrays, as they are sent.
  RowMessage(uint32_t tag, const std::vector<Array>& arrays,
             const std::vector<Array>& final_observation, std::string rest);

  size_t num_bytes() const;
  size_t arrays_begin() const;    // bytes before the first array; less than kLine
  void write(uint8_t* to) const;  // copies the arrays

 private:
  const uint32_t tag_;
  const std::vector<Array>&arrays_, &final_observation_;
  const std::string rest_;
  const size_t size_, final_size_, body_;
};
constexpr size_t kLine = 64;

RowMessage step_message(const EnvRow& row);
// With its layout if the environment has no action space.
RowMessage action_message(const std::vector<Array>& action, uint64_t number,
                          bool with_layout = false);
// Written into a block of `pool`. The transport returns the block after sending it,
// from any thread.
grpc::ByteBuffer encode(const RowMessage& message, MemoryPool& pool);

// Read any message of at most kMaxHelloBytes: for hellos and errors. Throw WireError.
wire::EnvMessage decode_env_message(grpc::ByteBuffer* message);
wire::AgentMessage decode_agent_message(grpc::ByteBuffer* message);
// Reads a step into row->arrays, and into new memory of `pool` for these, if they are
// empty, and for a final observation: once the sizes are right. Returns the text if the
// message is an error instead.
// Throws WireError if it is neither, or not as `spec` says. Then the arrays may hold
// anything.
std::optional<std::string> decode_step(grpc::ByteBuffer* message,
                                       const StreamSpec& spec, MemoryPool& pool,
                                       EnvRow* row);
// Reads an action into `action`, which the caller has allocated. Returns its number.
// Throws WireError.
uint64_t decode_action(grpc::ByteBuffer* message, const std::vector<Array>& action);
// Reads an action [num_envs, ...] of any dtype and shape: that of its layout.
uint64_t decode_action_with_layout(grpc::ByteBuffer* message, int64_t num_envs,
                                   MemoryPool& pool, std::vector<Array>* action);

}  // namespace torchbeast
