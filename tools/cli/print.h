// Text for people, on standard output (`say`) and standard error (`warn`). Nothing here throws, so
// that a full disk behind a log never ends a run. Text that cannot be printed is lost. For standard
// output, one line on standard error reports the loss. On a terminal, `say` breaks lines that are
// too long for the terminal. `say_text` prints text unchanged, such as JSON.
//
// Thread rule: any thread.
#pragma once

#include <string_view>

#include <fmt/format.h>

namespace sluice {

// The function opens /dev/null for each of the descriptors 0, 1 and 2 that is closed. Otherwise the
// next opened file would get such a descriptor, and printed text would go into that file. The
// function is called at the start of main().
void keep_standard_descriptors() noexcept;

// From this call on, all text that say() prints goes to standard error, because standard output
// gets an output's data.
void leave_standard_output_to_data() noexcept;

// The descriptor to which say() writes. The descriptor is standard output, or standard error after
// leave_standard_output_to_data(). For coloured().
int said_descriptor() noexcept;

void say_text(std::string_view text) noexcept;
void warn_text(std::string_view text) noexcept;
// The function prints as say_text() does. If the text goes to a terminal, long lines of the text
// are broken to fit.
void say_fitted(std::string_view text);

template <class... Arguments>
void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) noexcept {
  try {
    say_fitted(fmt::format(format, std::forward<Arguments>(arguments)...));
  } catch (...) {
    // No memory is left. The text is lost, and the run goes on.
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

// Flushes the text said so far.
void flush_said() noexcept;

// The errno of the first text that could not be printed; 0 = no failure.
int said_failure() noexcept;

}  // namespace sluice
