// Texts of messages: shorter ones, and ones that are safe to print.

#pragma once

#include <cstddef>
#include <string>

namespace torchbeast {

// The first `size` bytes, or up to 3 fewer: no character of UTF-8 is cut.
inline std::string first_bytes(const std::string& text, size_t size) {
  const size_t least = size < 3 ? 0 : size - 3;
  while (size < text.size() && size > least && (text[size] & 0xC0) == 0x80) --size;
  return text.substr(0, size);
}

// The text without its middle, if it has more than `size` bytes: a traceback says most
// at its end.
inline std::string shortened(const std::string& text, size_t size) {
  if (text.size() <= size) return text;
  const size_t end = first_bytes(text, text.size() - size / 2).size();
  return first_bytes(text, size / 2) + "\n[...]\n" + text.substr(end);
}

// The number of bytes of the UTF-8 character at `i`, if it may be printed; else 0: it
// is not UTF-8, a control character, or one that ends a line or changes the direction
// of writing.
inline size_t printable_size(const std::string& text, size_t i) {
  const auto byte = [&text](size_t at) {
    return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u;
  };
  const unsigned first = byte(i);
  if (first < 0x80) return (first >= ' ' && first != 0x7f) || first == '\t' ? 1 : 0;
  const size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  unsigned code = first & (0x7f >> size);
  for (size_t k = 1; k < size; ++k) {
    if ((byte(i + k) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i + k) & 0x3f);
  }
  constexpr unsigned kLeast[] = {0, 0, 0xa0, 0x800, 0x10000};
  const bool is_character = first >= 0xc2 && first <= 0xf4 && code >= kLeast[size] &&
                            code < 0x110000 && (code < 0xd800 || code > 0xdfff);
  const bool is_format = (code >= 0x200e && code <= 0x200f) ||
                         (code >= 0x2028 && code <= 0x202e) ||
                         (code >= 0x2066 && code <= 0x2069);
  return is_character && !is_format ? size : 0;
}

// A text that may come from a peer, for logs and terminals: what can't be printed
// becomes \xNN, and all lines but the first begin with kMargin, so that none looks like
// a message of its own. Applied again, it changes nothing.
inline std::string printable(const std::string& text) {
  const std::string kMargin = "  | ";
  constexpr char kDigits[] = "0123456789abcdef";
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const size_t size = printable_size(text, i);
    if (size > 0) {
      result.append(text, i, size);
      i += size;
      continue;
    }
    const auto byte = static_cast<unsigned char>(text[i++]);
    if (byte == '\n') {
      result += '\n';
      if (text.compare(i, kMargin.size(), kMargin) != 0) result += kMargin;
    } else {
      result += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return result;
}

}  // namespace torchbeast
