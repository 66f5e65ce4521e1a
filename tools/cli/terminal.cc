#include "tools/cli/terminal.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/utf8.h"
#include "tools/cli/print.h"

namespace sluice {
namespace {

constexpr std::size_t kColumns = 80;  // where the terminal does not tell
constexpr auto kQuietTime = std::chrono::seconds(2);
constexpr auto kTick = std::chrono::milliseconds(500);

// Bytes of `text` from `begin` that are not seen: an escape sequence, or what continues a letter.
std::size_t unseen_bytes(std::string_view text, std::size_t begin) {
  if ((static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) return 1;
  if (text[begin] != '\x1b') return 0;
  const std::size_t end = text.find('m', begin);
  return end == std::string_view::npos ? 1 : end + 1 - begin;
}

// Where the last column begins, if that leaves it two fifths of the width; else a small indent.
std::size_t indent_of(std::string_view line, std::size_t columns) {
  std::size_t indent = 0, seen = 0;
  for (std::size_t i = 0; i < line.size() && seen <= columns * 3 / 5;) {
    if (const std::size_t unseen = unseen_bytes(line, i); unseen != 0) {
      i += unseen;
      continue;
    }
    if (i >= 2 && line[i] != ' ' && line[i - 1] == ' ' && line[i - 2] == ' ') indent = seen;
    ++i;
    ++seen;
  }
  return indent;
}

void append_fitted(std::string& text, std::string_view line, std::size_t columns) {
  const std::size_t indent = indent_of(line, columns);
  std::size_t begin = 0, seen = 0, last_space = 0;
  for (std::size_t i = 0; i < line.size();) {
    if (const std::size_t unseen = unseen_bytes(line, i); unseen != 0) {
      i += unseen;
      continue;
    }
    if (line[i] == ' ' && seen > indent) last_space = i;
    ++i;
    if (++seen <= columns || last_space <= begin) continue;
    text.append(line, begin, last_space - begin);
    text.append("\n").append(indent, ' ');
    begin = last_space + 1;
    i = begin;
    seen = indent;
  }
  text.append(line, begin);
}

}  // namespace

bool is_terminal(int descriptor) {
  return ::isatty(descriptor) == 1;
}

std::size_t terminal_columns(int descriptor) {
  winsize size{};
  const bool is_known = ::ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col != 0;
  return is_known ? size.ws_col : kColumns;
}

bool takes_output(int descriptor) {
  pollfd place{.fd = descriptor, .events = POLLOUT, .revents = 0};
  return ::poll(&place, 1, 0) != 0;  // an error is left to the write
}

std::string coloured(int descriptor, Colour colour, std::string_view text) {
  const char* const unwanted = std::getenv("NO_COLOR");
  const char* const term = std::getenv("TERM");
  const bool is_dumb = term == nullptr || std::string_view(term) == "dumb";
  if (!is_terminal(descriptor) || is_dumb || (unwanted != nullptr && *unwanted != '\0'))
    return std::string(text);
  const char* const code = colour == Colour::kGood      ? "32"
                           : colour == Colour::kWarning ? "33"
                                                        : "31";
  return fmt::format("\x1b[{}m{}\x1b[0m", code, text);
}

std::string fitted(std::string_view text, std::size_t columns) {
  std::string result;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    append_fitted(result, text.substr(0, end), columns);
    if (end != text.size()) result += '\n';
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return result;
}

std::string_view first_columns(std::string_view line, std::size_t columns) {
  std::size_t end = 0;
  while (end < line.size()) {
    const std::size_t unseen = unseen_bytes(line, end);
    if (unseen == 0 && columns-- == 0) break;
    end += std::max<std::size_t>(unseen, 1);
  }
  return line.substr(0, end);
}

std::string plain_text(std::string_view text) {
  std::string plain;
  while (!text.empty()) {
    const Utf8Character letter = first_utf8(text);
    const char32_t code = letter.code.value_or(0);
    const bool is_plain =
        code == '\n' || code == '\t' || (code >= 0x20 && code < 0x7f) || code >= 0xa0;
    plain += is_plain ? text.substr(0, letter.size_bytes) : "\xef\xbf\xbd";
    text.remove_prefix(letter.size_bytes);
  }
  return plain;
}

Progress::Progress(std::string what, bool is_quiet) : what_(std::move(what)) {
  if (is_quiet || !is_terminal(STDERR_FILENO)) return;
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) {
    // Work goes on without being told of.
  }
}

Progress::~Progress() {
  {
    const std::scoped_lock lock(mutex_);
    is_ending_ = true;
  }
  ended_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Progress::set(std::string what) {
  const std::scoped_lock lock(mutex_);
  what_ = std::move(what);
}

void Progress::run() {
  std::unique_lock lock(mutex_);
  if (ended_.wait_for(lock, kQuietTime, [this] { return is_ending_; })) return;
  do {
    const auto elapsed =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - begin_);
    const std::string line =
        fmt::format("{} ... {}m{:02}s", what_, elapsed.count() / 60, elapsed.count() % 60);
    show_open_line(STDERR_FILENO, first_columns(line, terminal_columns(STDERR_FILENO) - 1));
  } while (!ended_.wait_for(lock, kTick, [this] { return is_ending_; }));
  show_open_line(STDERR_FILENO, "");
}

}  // namespace sluice
