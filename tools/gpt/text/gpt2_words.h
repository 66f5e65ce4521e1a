// The functions split a text into words. GPT-2's tokenizer merges bytes only inside such a word.
// The words are the matches of
//
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// A text that is not UTF-8 keeps all of its bytes. Each byte outside of a valid sequence is a
// character, but no letter, number or space. Pure, callable from any thread.
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// The length of the first word, at least 1. Requires: `text` is not empty.
std::size_t gpt2_word_bytes(std::string_view text);

// Finds a place at which `text` can be cut. The words of the two parts are then the words of the
// whole text. Returns the last such place behind `from_bytes` and not behind `limit_bytes`, or 0 if
// there is no such place. The place lies behind a character that is not a space, and before an
// ASCII space or line end.
std::size_t gpt2_cut_bytes(std::string_view text, std::size_t limit_bytes,
                           std::size_t from_bytes = 0);

}  // namespace sluice
