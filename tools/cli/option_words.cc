#include "tools/cli/option_words.h"

#include <cctype>
#include <string>
#include <string_view>

namespace sluice {
namespace {

bool is_of_word(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_' || letter == '-' ||
         letter == '/';
}

// A file's name may have the key inside: "my.data.file.txt".
bool is_whole_word(std::string_view text, std::size_t begin, std::size_t end) {
  const auto is_letter = [&](std::size_t at) { return at < text.size() && is_of_word(text[at]); };
  if (is_of_word(text[begin]) && begin > 0 && (is_letter(begin - 1) || text[begin - 1] == '.'))
    return false;
  if (!is_of_word(text[end - 1])) return true;  // "--set run.steps=", before a value
  const bool is_dot = end < text.size() && text[end] == '.';
  return !is_letter(is_dot ? end + 1 : end);
}

}  // namespace

Error in_words_of(std::initializer_list<OptionWord> words, const Error& error) {
  std::string text = error.what();
  for (const OptionWord& word : words) {
    if (!word.is_given) continue;
    for (std::size_t at = text.find(word.key); at != std::string::npos;
         at = text.find(word.key, at + 1)) {
      std::size_t count = word.key.size();
      if (!is_whole_word(text, at, at + count)) continue;
      const bool is_quoted =
          at > 0 && text[at - 1] == '"' && at + count < text.size() && text[at + count] == '"';
      if (is_quoted) {
        --at;
        count += 2;
      }
      text.replace(at, count, word.option);
      at += word.option.size() - 1;
    }
  }
  return {error.code(), text};
}

}  // namespace sluice
