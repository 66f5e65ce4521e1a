// Reads characters of UTF-8 from texts that may also contain other bytes.
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace sluice {

struct Utf8Character {
  std::optional<char32_t> code;  // empty: a byte outside of a well-formed sequence
  std::size_t size_bytes = 1;
};

// Returns the first character of `text`. The character is a sequence that Unicode calls well-formed
// (table 3-7 of the standard), or a single byte.
// Requires: `text` is not empty.
Utf8Character first_utf8(std::string_view text);

// Returns whether `text` consists of well-formed sequences alone.
bool is_utf8(std::string_view text);

// Returns `text` with U+FFFD in place of each byte outside of well-formed sequences.
std::string valid_utf8(std::string_view text);

}  // namespace sluice
