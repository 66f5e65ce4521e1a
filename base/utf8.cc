#include "base/utf8.h"

#include <array>

namespace sluice {

Utf8Character first_utf8(std::string_view text) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {.code = lead, .size_bytes = 1};
  const std::size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < size) return {};
  char32_t code = lead & (0x7Fu >> size);
  for (std::size_t at = 1; at < size; ++at) {
    if ((byte(at) & 0xC0) != 0x80) return {};
    code = code << 6 | (byte(at) & 0x3Fu);
  }
  constexpr std::array<char32_t, 5> kLeast{0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < kLeast[size] || is_surrogate || code > 0x10FFFF) return {};
  return {.code = code, .size_bytes = size};
}

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Character character = first_utf8(text);
    if (!character.code) return false;
    text.remove_prefix(character.size_bytes);
  }
  return true;
}

std::string valid_utf8(std::string_view text) {
  std::string valid;
  while (!text.empty()) {
    const Utf8Character character = first_utf8(text);
    valid += character.code ? text.substr(0, character.size_bytes) : "\xEF\xBF\xBD";
    text.remove_prefix(character.size_bytes);
  }
  return valid;
}

}  // namespace sluice
