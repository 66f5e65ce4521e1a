// Starts threads that have names. Debuggers and `top` show these names. Thread rule: any thread.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace sluice {

// Debuggers show only the first 15 characters of `name`. `body` runs on the new thread. The thread
// has the floating-point environment of base/float_environment.h, not the caller's environment. The
// thread runs on the processors that NumaNodes::stay_near() selected. Fails with kUnsupported if
// the machine cannot start a thread. The message names the thread, and the limits that the user
// should raise.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace sluice
