// Finds out whether a file system can keep a durable store safe.
//
// Thread rule: any thread may call the function. The function reads from the file system.
#pragma once

#include <string>

namespace sluice {

// Returns the reason why a store in `directory` may be lost even if all flushes have succeeded. The
// result is empty if there is no such reason.
std::string missing_promise(const std::string& directory);

}  // namespace sluice
