// Text for people, on standard output (`say`) and standard error (`warn`). Nothing here throws, so
// that a full disk behind a log never ends a run. Text that cannot be printed is lost; for standard
// output, a line on standard error says so once. On a terminal, `say` breaks lines that are too
// long for it; `say_text` prints its text unchanged, such as JSON.
//
// Thread rule: any thread.
#pragma once

#include <string_view>

#include <fmt/format.h>

namespace sluice {

// A closed descriptor 0, 1 or 2 would be given to the next file that is opened, and printed text
// would go into that file. So such descriptors are opened onto /dev/null. For the start of main().
void keep_standard_descriptors() noexcept;

void say_text(std::string_view text) noexcept;
void warn_text(std::string_view text) noexcept;
// As say_text, in lines that fit the terminal, if there is one.
void say_fitted(std::string_view text);

template <class... Arguments>
void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) noexcept {
  try {
    say_fitted(fmt::format(format, std::forward<Arguments>(arguments)...));
  } catch (...) {
    // Memory is used up: the text is lost, and the run goes on.
  }
}

template <class... Arguments>
void warn(fmt::format_string<Arguments...> format, Arguments&&... arguments) noexcept {
  try {
    warn_text(fmt::format(format, std::forward<Arguments>(arguments)...));
  } catch (...) {
    // As above.
  }
}

// Shows what has been said so far, where standard output is a terminal, a pipe or a log.
void flush_said() noexcept;

// The errno of the first failure of standard output; 0 = it has taken everything.
int said_failure() noexcept;

}  // namespace sluice
