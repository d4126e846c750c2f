// Steps and actions as messages.

#pragma once

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "codec.h"

namespace torchbeast {

inline MemoryPool& pool() {
  static MemoryPool pool;
  return pool;
}

// All bytes of the arrays, as a field holds them.
inline std::string content(const std::vector<Array>& arrays) {
  std::string bytes;
  for (const Array& array : arrays) {
    bytes += std::string(array.as<const char>(), array.num_bytes());
  }
  return bytes;
}

inline grpc::ByteBuffer encode_step(const EnvRow& row, MemoryPool& pool) {
  return encode(step_message(row), pool);
}

inline grpc::ByteBuffer encode_action(const std::vector<Array>& action, uint64_t number,
                                      MemoryPool& pool, bool with_layout = false) {
  return encode(action_message(action, number, with_layout), pool);
}

inline std::string bytes_of(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Dump(&slices).ok()) std::abort();
  std::string bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// A buffer of slices of `chunk` bytes each, as the transport may deliver a message.
inline grpc::ByteBuffer buffer_of(const std::string& bytes, size_t chunk = 1 << 20) {
  std::vector<grpc::Slice> slices(1);  // and one without bytes
  for (size_t i = 0; i < bytes.size(); i += chunk) {
    slices.emplace_back(bytes.substr(i, chunk));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace torchbeast
