// Shorter texts: for messages with a limit.

#pragma once

#include <cstddef>
#include <string>

namespace torchbeast {

// The first `size` bytes, or fewer: no character of UTF-8 is cut.
inline std::string first_bytes(const std::string& text, size_t size) {
  while (size < text.size() && size > 0 && (text[size] & 0xC0) == 0x80) --size;
  return text.substr(0, size);
}

// The text without its middle, if it has more than `size` bytes: a traceback says most
// at its end.
inline std::string shortened(const std::string& text, size_t size) {
  if (text.size() <= size) return text;
  const size_t end = first_bytes(text, text.size() - size / 2).size();
  return first_bytes(text, size / 2) + "\n[...]\n" + text.substr(end);
}

}  // namespace torchbeast
