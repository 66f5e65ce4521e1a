// Splits a text into the words that GPT-2's tokenizer merges bytes within. They are the matches of
//
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// A text that is not UTF-8 keeps all of its bytes: each byte outside of a valid sequence is a
// character that is neither letter, number nor space. Pure, callable from any thread.
#pragma once

#include <cstddef>
#include <string_view>

namespace sluice {

// The length of the first word, at least 1. Requires: `text` is not empty.
std::size_t gpt2_word_bytes(std::string_view text);

// A place where `text` can be cut so that the words of both parts are the words of the whole: the
// last such place at or before `limit_bytes` and behind `from_bytes`, or 0 where there is none. It
// lies between a character that is no space and a space or line end of ASCII.
std::size_t gpt2_cut_bytes(std::string_view text, std::size_t limit_bytes,
                           std::size_t from_bytes = 0);

}  // namespace sluice
