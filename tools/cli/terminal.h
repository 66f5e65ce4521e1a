// This header has functions for terminals: the width, colours, lines that fit the width, and the
// progress of long work. A file or a pipe receives unchanged lines, without colours and without
// progress.
//
// Thread rule: any thread may call the functions. One thread uses a Progress.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

namespace sluice {

bool is_terminal(int descriptor);
// Returns the width of the terminal behind `descriptor`, or 80 if the width is unknown.
std::size_t terminal_columns(int descriptor);

// Returns whether a short text can be written to `descriptor` at once. A terminal without a reader
// is soon full, and then a write waits.
bool takes_output(int descriptor);

enum class Colour { kGood, kWarning, kBad };
// Returns `text` in colour if three conditions hold: `descriptor` is a terminal, the variable
// NO_COLOR is not set, and TERM is not "dumb". https://no-color.org defines NO_COLOR. Otherwise,
// the result is `text` without colour.
std::string coloured(int descriptor, Colour colour, std::string_view text);

// Returns `text` with additional line breaks. Each line that is longer than `columns` is broken
// between words. In a line of a table, two spaces precede the last column. If a line of a table is
// broken, the rest of the line goes under the last column, so that the table stays readable.
std::string fitted(std::string_view text, std::size_t columns);

// Returns the beginning of `line` that is `columns` letters wide. Letters and escape sequences stay
// whole.
std::string_view first_columns(std::string_view line, std::size_t columns);

// Returns `text` without bytes that would change a terminal: U+FFFD stands in place of each control
// character except line feeds and tabs, and of each byte that is no UTF-8.
std::string plain_text(std::string_view text);

// Shows the progress of one piece of work. After two seconds, a line on standard error shows the
// name of the work and the time since the work began. If standard error is not a terminal, no line
// is shown. The destructor removes the line.
class Progress {
 public:
  explicit Progress(std::string what, bool is_quiet = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Replaces the text that names the work.
  void set(std::string what);

 private:
  void run();

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable ended_;
  std::string what_;        // guarded by mutex_
  bool is_ending_ = false;  // guarded by mutex_
  std::thread thread_;
};

// Returns the result of `work`. While `work` runs, a Progress shows `what`. So the line is gone
// when the caller prints the result.
template <class Work>
auto with_progress(std::string what, const Work& work) {
  const Progress progress(std::move(what));
  return work();
}

}  // namespace sluice
