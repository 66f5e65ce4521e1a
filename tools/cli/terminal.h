// Output for terminals: the width, colours if they are wanted, lines that fit, and the progress of
// long work. Files and pipes get unchanged lines without colours or progress.
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

namespace sluice {

bool is_terminal(int descriptor);
// The width of the terminal behind `descriptor`. If the width is unknown, the result is 80.
std::size_t terminal_columns(int descriptor);

enum class Colour { kGood, kWarning, kBad };
// The function returns `text` in colour if three things hold: `descriptor` is a terminal, NO_COLOR
// is not set (https://no-color.org), and TERM is not "dumb".
std::string coloured(int descriptor, Colour colour, std::string_view text);

// Returns `text` with each line that is longer than `columns` broken between words. In a table, the
// last column begins after two spaces. The rest of a broken line is placed under this column. So
// tables stay tables.
std::string fitted(std::string_view text, std::size_t columns);

// While some work takes longer than a second, a line on standard error says which work is going on,
// and for how long. There is no such line if standard error is no terminal. The destructor removes
// the line.
class Progress {
 public:
  explicit Progress(std::string what, bool is_quiet = false);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Replaces the text.
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

}  // namespace sluice
