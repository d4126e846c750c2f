// Steps and actions as messages.

#pragma once

#include <cstdint>
#include <vector>

#include "codec.h"

namespace torchbeast {

inline grpc::ByteBuffer encode_step(const EnvRow& row, MemoryPool& pool) {
  return encode(step_message(row), pool);
}

inline grpc::ByteBuffer encode_action(const std::vector<Array>& action, uint64_t number,
                                      MemoryPool& pool, bool with_layout = false) {
  return encode(action_message({action, {}, 0, number}, with_layout), pool);
}

}  // namespace torchbeast
