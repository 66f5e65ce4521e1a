// Finds out whether a file system can keep a durable store safe.
//
// Thread rule: any thread may call the function. The function asks the file system.
#pragma once

#include <string>

namespace sluice {

// Returns the reason why a store in `directory` may be lost, although its flushes have succeeded.
// The result is empty if there is no such reason.
std::string missing_promise(const std::string& directory);

}  // namespace sluice
