#include "tools/gpt/text/gpt2_words.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/utf8.h"
#include "tools/gpt/text/unicode_ranges.h"

namespace sluice {
namespace {

enum class CharClass : std::uint8_t { kOther, kLetter, kNumber, kSpace };

struct Character {
  CharClass kind = CharClass::kOther;
  std::size_t size_bytes = 1;
};

constexpr char32_t kPlaneOne = 0x10000;

bool is_in(std::span<const CodeRange> ranges, char32_t code) {
  const auto next = std::ranges::upper_bound(ranges, code, {}, &CodeRange::first);
  return next != ranges.begin() && code <= std::prev(next)->last;
}

CharClass look_up(char32_t code) {
  if (is_in(letter_ranges(), code)) return CharClass::kLetter;
  if (is_in(number_ranges(), code)) return CharClass::kNumber;
  return is_in(space_ranges(), code) ? CharClass::kSpace : CharClass::kOther;
}

CharClass class_of(char32_t code) {
  // Nearly all characters of texts: one look instead of three searches.
  static const std::vector<CharClass> basic_plane = [] {
    std::vector<CharClass> classes(kPlaneOne);
    for (char32_t each = 0; each < kPlaneOne; ++each) classes[each] = look_up(each);
    return classes;
  }();
  return code < kPlaneOne ? basic_plane[code] : look_up(code);
}

// The first character of `text`, which is not empty.
Character first_character(std::string_view text) {
  const Utf8Character character = first_utf8(text);
  return {.kind = character.code ? class_of(*character.code) : CharClass::kOther,
          .size_bytes = character.size_bytes};
}

// The length of the characters of one kind at the start of `text`.
std::size_t run_bytes(std::string_view text, CharClass kind) {
  std::size_t at = 0;
  while (at < text.size()) {
    const Character character = first_character(text.substr(at));
    if (character.kind != kind) break;
    at += character.size_bytes;
  }
  return at;
}

// \s+(?!\S)|\s+
std::size_t space_bytes(std::string_view text) {
  std::size_t at = 0, last = 0;
  while (at < text.size()) {
    const Character character = first_character(text.substr(at));
    if (character.kind != CharClass::kSpace) break;
    last = at;
    at += character.size_bytes;
  }
  // The last space before a word belongs to what follows, unless it is the only one.
  return at < text.size() && last != 0 ? last : at;
}

}  // namespace

std::size_t gpt2_word_bytes(std::string_view text) {
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.starts_with(ending)) return ending.size();
  }
  const std::size_t space = text[0] == ' ' ? 1 : 0;
  if (space < text.size()) {
    const CharClass kind = first_character(text.substr(space)).kind;
    if (kind != CharClass::kSpace) return space + run_bytes(text.substr(space), kind);
  }
  return space_bytes(text);
}

std::size_t gpt2_cut_bytes(std::string_view text, std::size_t limit_bytes, std::size_t from_bytes) {
  std::size_t at = std::min(limit_bytes, text.size() - 1);
  for (; at > from_bytes; --at) {
    if (text[at] != ' ' && text[at] != '\n') continue;
    // The start of the character before: at most three bytes of continuation.
    std::size_t start = at - 1;
    while (start > 0 && at - start < 4 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80)
      --start;
    const Character before = first_character(text.substr(start, at - start));
    const bool is_whole = start + before.size_bytes == at;
    if (!is_whole || before.kind != CharClass::kSpace) return at;
  }
  return 0;
}

}  // namespace sluice
