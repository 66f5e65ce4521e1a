// Starts threads with a name that debuggers and `top` show, and says what to do where the machine
// gives none. Thread rule: any thread.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace sluice {

// `name`: of what is longer, the first 15 characters are shown. `body` runs on the new thread.
// Fails with: kUnsupported naming the thread and the limits to raise.
std::thread start_thread(const std::string& name, std::function<void()> body);

}  // namespace sluice
