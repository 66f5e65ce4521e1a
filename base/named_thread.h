// Starts threads that have names. Debuggers and `top` show these names. Thread rule: any thread.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include <sluice/error.h>

namespace sluice {

// Debuggers show only the first 15 characters of `name`. `body` runs on the new thread. The thread
// has the floating-point environment of base/float_environment.h, not the caller's environment. The
// thread is bound by NumaNodes::bind_new_thread(). Fails with kUnsupported if the machine cannot
// start a thread. The message names the thread, and the limits that the user should raise.
std::thread start_thread(const std::string& name, std::function<void()> body);

// The error of start_thread(), for threads that a library starts. `what` is as in "the thread
// "sluice-work"".
Error thread_refused(const std::string& what, int error_number);

}  // namespace sluice
