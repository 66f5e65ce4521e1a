// Starts threads that have names. Debuggers and `top` show these names. Thread rule: any thread.
//
// These threads take no signal that is meant for the process. A program may block SIGTERM in its
// own threads, and wait for it with sigtimedwait() or signalfd(). If one thread of the process did
// not block SIGTERM, the signal would go to that thread, and would end the process.
#pragma once

#include <signal.h>

#include <functional>
#include <string>
#include <thread>

#include <sluice/error.h>

namespace sluice {

// While an object lives, its thread blocks all signals, except for those in which a thread's own
// fault or the profiler's clock speaks. Threads that are started meanwhile inherit that. For
// libraries that start threads. Costs nothing on threads of start_thread().
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  const bool blocks_;
  sigset_t before_;  // set if blocks_
};

// Debuggers show only the first 15 characters of `name`. `body` runs on the new thread. The thread
// has the floating-point environment of base/float_environment.h, not the caller's environment. The
// thread is bound by NumaNodes::bind_new_thread(), and blocks signals as SignalsBlocked does. Fails
// with kUnsupported if the machine cannot start a thread. The message names the thread, and the
// limits that the user should raise.
std::thread start_thread(const std::string& name, std::function<void()> body);

// The error of start_thread(), for threads that a library starts. `what` is as in "the thread
// "sluice-work"".
Error thread_refused(const std::string& what, int error_number);

}  // namespace sluice
