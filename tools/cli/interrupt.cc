#include "tools/cli/interrupt.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <ctime>

#include "tools/cli/exit_codes.h"
#include "tools/cli/print.h"
#include "tools/cli/temporary_file.h"

namespace sluice {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
constexpr char kEnded[] = "sluice: interrupted before the first step; nothing was written\n";
constexpr char kEndedNow[] = "sluice: ended at once; what was not written yet is lost\n";

// The handler runs in any thread, so these are atomic; all of them are lock-free.
std::atomic<bool> was_interrupted{false};
std::atomic<std::int64_t> first_ns{0};  // when it was
std::atomic<bool> is_silent{false};
std::atomic<const char*> ending_answer{kEnded};
std::atomic<const char*> deferred_answer{nullptr};  // null = a signal ends the process
static_assert(std::atomic<const char*>::is_always_lock_free);

void answer(const char* text) {
  if (is_silent.load()) return;
  end_open_line();
  // A text that cannot be written has no reader.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

// A terminal that goes away, and a manager that ends services and jobs, send two signals at once;
// that is not a second request. Neither is a SIGHUP, whenever it comes.
constexpr std::int64_t kOnceMoreNs = 100'000'000;

std::int64_t now_ns() {
  timespec now{};
  (void)::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Only calls that are safe in a signal handler.
extern "C" void handle_interrupt(int signal_number) {
  const int saved_errno = errno;
  const char* const deferred = deferred_answer.load();
  if (deferred == nullptr) {
    answer(ending_answer.load());
    remove_temporary_files();
    ::_exit(kExitInterrupted);
  }
  if (!was_interrupted.exchange(true)) {
    first_ns.store(now_ns());
    answer(deferred);
  } else if (signal_number != SIGHUP && first_ns.load() != 0 &&
             now_ns() - first_ns.load() >= kOnceMoreNs) {
    answer(kEndedNow);
    remove_temporary_files();
    std::signal(signal_number, SIG_DFL);
    std::raise(signal_number);  // delivered when this handler returns
  }
  errno = saved_errno;
}

}  // namespace

void catch_interrupts() {
  for (const int number : kSignals) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = handle_interrupt;
    action.sa_flags = SA_RESTART;
    // One signal at a time. In two threads, the exchange of the flag decides which one is the
    // first; in one thread they must not nest.
    for (const int other : kSignals) ::sigaddset(&action.sa_mask, other);
    (void)::sigaction(number, &action, nullptr);
  }
}

void say_at_interrupt(const char* text) {
  ending_answer.store(text);
}

void defer_interrupts(const char* answer_text) {
  deferred_answer.store(answer_text);
}

void silence_interrupts() {
  is_silent.store(true);
}

bool interrupted() {
  return was_interrupted.load();
}

}  // namespace sluice
