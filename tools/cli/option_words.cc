#include "tools/cli/option_words.h"

#include <string>

namespace sluice {

Error in_words_of(std::initializer_list<OptionWord> words, const Error& error) {
  std::string text = error.what();
  for (const OptionWord& word : words) {
    if (!word.is_given) continue;
    for (std::size_t at = text.find(word.key); at != std::string::npos;
         at = text.find(word.key, at + word.option.size())) {
      std::size_t count = word.key.size();
      const bool is_quoted =
          at > 0 && text[at - 1] == '"' && at + count < text.size() && text[at + count] == '"';
      if (is_quoted) {
        --at;
        count += 2;
      }
      text.replace(at, count, word.option);
    }
  }
  return {error.code(), text};
}

}  // namespace sluice
