#include "base/named_thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "base/float_environment.h"
#include "base/numa.h"

namespace sluice {
namespace {

constexpr std::size_t kNameBytesMax = 15;  // the kernel's

// Faults come to the thread that makes them, and end the process even where they are blocked: then
// without the program's handler. SIGPROF measures the thread that it interrupts. A blocked SIGPIPE
// or SIGXFSZ makes the write fail with an error, which has a message.
constexpr int kTaken[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF};

// Whether start_thread() has started the calling thread.
constinit thread_local bool is_started_here = false;

}  // namespace

SignalsBlocked::SignalsBlocked() : blocks_(!is_started_here) {
  if (!blocks_) return;
  sigset_t signals;
  ::sigfillset(&signals);
  for (const int taken : kTaken) ::sigdelset(&signals, taken);
  (void)::pthread_sigmask(SIG_BLOCK, &signals, &before_);
}

SignalsBlocked::~SignalsBlocked() {
  if (blocks_) (void)::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

std::thread start_thread(const std::string& name, std::function<void()> body) {
  try {
    const SignalsBlocked signals;
    return std::thread([shown = name.substr(0, kNameBytesMax), body = std::move(body)] {
      is_started_here = true;
      (void)::pthread_setname_np(::pthread_self(), shown.c_str());
      set_float_environment();
      NumaNodes::bind_new_thread();
      body();
    });
  } catch (const std::system_error& error) {
    throw thread_refused(fmt::format("the thread \"{}\"", name), error.code().value());
  }
}

Error thread_refused(const std::string& what, int error_number) {
  return Error(ErrorCode::kUnsupported,
               fmt::format("cannot start {}: {}; raise the number of processes (ulimit -u) or the "
                           "container's (pids.max of its cgroup), or leave room in memory for the "
                           "thread's stack (ulimit -v)",
                           what, errno_text(error_number)));
}

}  // namespace sluice
