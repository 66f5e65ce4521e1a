// The library's error messages refer to settings by the keys of the config. If a command-line
// option has set a key, the message should name the option instead of the key.
//
// Thread rule: any thread.
#pragma once

#include <initializer_list>
#include <string_view>
#include <utility>

#include <sluice/error.h>

namespace sluice {

struct OptionWord {
  std::string_view key;     // "storage.paths"
  std::string_view option;  // "--path"
  bool is_given = true;     // false: the config gives the value, so messages name the key
};

// Returns a copy of `error`. The copy's message contains an option in place of each key that
// `words` lists. Keys with and without quotes are replaced.
Error in_words_of(std::initializer_list<OptionWord> words, const Error& error);

// Runs `work` and returns its result.
// Fails with the errors of `work`. The messages of these errors contain options instead of keys.
template <class Work>
auto with_words(std::initializer_list<OptionWord> words, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw in_words_of(words, error);
  }
}

}  // namespace sluice
