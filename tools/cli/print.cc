#include "tools/cli/print.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include <sluice/error.h>
#include "tools/cli/terminal.h"

namespace sluice {
namespace {

std::atomic<int> failure{0};
std::atomic<bool> says_beside{false};  // on standard error, beside data on standard output
std::atomic<int> open_descriptor{-1};  // of the open line; -1 = none
static_assert(std::atomic<int>::is_always_lock_free);

std::FILE* said_stream() noexcept {
  return says_beside.load() ? stderr : stdout;
}

// One note for all that is lost from here on.
void note_failure(int error) noexcept {
  int none = 0;
  if (failure.compare_exchange_strong(none, error == 0 ? EIO : error))
    warn("sluice: cannot write to {}: {}; the rest is not printed\n",
         says_beside.load() ? "standard error" : "standard output", errno_text(error));
}

}  // namespace

void keep_standard_descriptors() noexcept {
  for (int descriptor = STDIN_FILENO; descriptor <= STDERR_FILENO; ++descriptor) {
    // open() takes the lowest free number, which is this one: those below it are open by now.
    if (::fcntl(descriptor, F_GETFD) < 0 && errno == EBADF) (void)::open("/dev/null", O_RDWR);
  }
}

void leave_standard_output_to_data() noexcept {
  flush_said();
  says_beside = true;
}

int said_descriptor() noexcept {
  return says_beside.load() ? STDERR_FILENO : STDOUT_FILENO;
}

void say_text(std::string_view text) noexcept {
  end_open_line();
  if (failure.load() != 0) return;
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), said_stream()) != text.size()) note_failure(errno);
}

void say_fitted(std::string_view text) {
  const int descriptor = said_descriptor();
  if (!is_terminal(descriptor)) return say_text(text);
  say_text(fitted(text, terminal_columns(descriptor)));
}

void warn_text(std::string_view text) noexcept {
  end_open_line();
  (void)std::fwrite(text.data(), 1, text.size(), stderr);
}

void show_open_line(int descriptor, std::string_view line) noexcept {
  const bool is_said = descriptor == said_descriptor();
  if (is_said && failure.load() != 0) return;
  // A signal may come at any time: before the line is there its handler ends one too many, and
  // ends this one behind it.
  open_descriptor = descriptor;
  std::FILE* stream = is_said ? said_stream() : stderr;
  errno = 0;
  bool is_printed = true;
  for (const std::string_view part : {std::string_view("\r"), line, std::string_view("\x1b[K")})
    is_printed = std::fwrite(part.data(), 1, part.size(), stream) == part.size() && is_printed;
  if (is_said && !is_printed) note_failure(errno);
  flush_said();
  open_descriptor = line.empty() ? -1 : descriptor;
}

void end_open_line() noexcept {
  const int descriptor = open_descriptor.exchange(-1);
  // The shown line has been flushed. A terminal that nothing reads is not waited for.
  if (descriptor >= 0 && takes_output(descriptor)) (void)!::write(descriptor, "\n", 1);
}

void flush_said() noexcept {
  if (failure.load() != 0) return;
  errno = 0;
  if (std::fflush(said_stream()) != 0) note_failure(errno);
}

int said_failure() noexcept {
  return failure.load();
}

}  // namespace sluice
