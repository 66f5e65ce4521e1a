// The functions split a text into words. The tokenizer of GPT-2 never merges bytes from different
// words. The words are the matches of this regular expression:
//
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// A text that is not UTF-8 keeps all of its bytes. Each byte outside of a valid UTF-8 sequence
// counts as a character that is neither a letter nor a number nor a space.
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// Returns the length of the first word, in bytes.
// Requires: `text` is not empty.
std::size_t gpt2_word_bytes(std::string_view text);

// Finds a place at which `text` can be cut into two parts without changing the words. The character
// before such a place is not a space. The character after such a place is an ASCII space or line
// end. Returns the last such place that is above `from_bytes` and not above `limit_bytes`. Returns
// 0 if there is no such place.
std::size_t gpt2_cut_bytes(std::string_view text, std::size_t limit_bytes,
                           std::size_t from_bytes = 0);

}  // namespace sluice
