// Errors of the library name keys of a config. Where a command sets such a key by an option of its
// own, its user knows the option.
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
  bool is_given = true;     // else the key is the config's
};

// The error with each key, in quotes or not, replaced by its option.
Error in_words_of(std::initializer_list<OptionWord> words, const Error& error);

// Runs `work` and returns what it does. Fails with: as `work`, in the command's own words.
template <class Work>
auto with_words(std::initializer_list<OptionWord> words, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    throw in_words_of(words, error);
  }
}

}  // namespace sluice
