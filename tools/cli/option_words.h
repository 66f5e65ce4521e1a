// Errors of the library name the keys of a config. Where a command sets such a key by a
// command-line option, the message should name the option.
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
  bool is_given = true;     // false: the value comes from the config, and its key stays
};

// Returns `error` with each key, in quotes or not, replaced by the key's option.
Error in_words_of(std::initializer_list<OptionWord> words, const Error& error);

// Runs `work` and returns its result. Fails with: as `work`, but the message names options.
template <class Work>
auto with_words(std::initializer_list<OptionWord> words, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw in_words_of(words, error);
  }
}

}  // namespace sluice
