// The functions print text for people. `say` prints to standard output, and `warn` prints to
// standard error. The functions of this file do not throw. If the disk is too full for the log, the
// run therefore continues without the log. Text that cannot be printed is lost. If text for
// standard output is lost, one line on standard error reports the loss. On a terminal, `say` breaks
// lines that are too long for the terminal. `say_text` prints its text unchanged, which is needed
// for JSON. If a line is open (show_open_line), every other function that prints ends the open line
// first.
//
// Thread rule: any thread.
#pragma once

#include <string_view>

#include <fmt/format.h>

namespace sluice {

// If one of the descriptors 0, 1 and 2 is closed, the call opens /dev/null under this descriptor.
// Without this call, a file that is opened later would get the closed descriptor, and would receive
// the printed text. Must be called at the start of main().
void keep_standard_descriptors() noexcept;

// From this call on, say() prints to standard error, because standard output receives the data of
// an output file.
void leave_standard_output_to_data() noexcept;

// Returns the descriptor to which say() writes. The descriptor is standard output or, after
// leave_standard_output_to_data(), standard error. Callers pass this descriptor to coloured().
int said_descriptor() noexcept;

void say_text(std::string_view text) noexcept;
void warn_text(std::string_view text) noexcept;
// Prints the same text as say_text(). If the text goes to a terminal, the function breaks lines
// that are too long for the terminal.
void say_fitted(std::string_view text);

template <class... Arguments>
void say(fmt::format_string<Arguments...> format, Arguments&&... arguments) noexcept {
  try {
    say_fitted(fmt::format(format, std::forward<Arguments>(arguments)...));
  } catch (...) {
    // No memory is left for the text. The text is lost, and the run continues.
  }
}

template <class... Arguments>
void warn(fmt::format_string<Arguments...> format, Arguments&&... arguments) noexcept {
  try {
    warn_text(fmt::format(format, std::forward<Arguments>(arguments)...));
  } catch (...) {
    // No memory is left for the text. The text is lost, and the run continues.
  }
}

// Prints `line` at once on `descriptor`, which is a terminal. The line stays open: the next open
// line replaces it. The line must fit the terminal's width. If `line` is empty, the open line is
// removed.
void show_open_line(int descriptor, std::string_view line) noexcept;
// Ends the open line, if there is one. May be called in a signal handler.
void end_open_line() noexcept;

// Flushes the text that say() has printed so far.
void flush_said() noexcept;

// Returns the errno of the first text that could not be printed. The result is 0 if all texts were
// printed.
int said_failure() noexcept;

}  // namespace sluice
