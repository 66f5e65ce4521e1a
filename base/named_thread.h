// Starts threads with a name that debuggers and `top` show, and says what to do where the machine
// cannot start one. Thread rule: any thread.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace sluice {

// `name`: only the first 15 characters are shown. `body` runs on the new thread.
// Fails with: kUnsupported naming the thread and the limits to raise.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace sluice
