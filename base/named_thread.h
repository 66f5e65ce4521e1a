// The function starts threads with a name that debuggers and `top` show. If the machine cannot
// start a thread, the message says what to do. Thread rule: any thread.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace sluice {

// Debuggers show only the first 15 characters of `name`. `body` runs on the new thread, in the
// environment of base/float_environment.h instead of the caller's environment. The thread runs on
// the processors that NumaNodes::stay_near() has chosen.
// Fails with kUnsupported, naming the thread and the limits to raise.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace sluice
