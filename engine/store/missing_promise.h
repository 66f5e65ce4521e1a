// The promises that a file system does not make to a durable store.
//
// Thread rule: any thread may call the function, which asks the file system.
#pragma once

#include <string>

namespace sluice {

// Returns why a store in `directory` may be lost although its flushes have succeeded. The result is
// empty if there is no such reason.
std::string missing_promise(const std::string& directory);

}  // namespace sluice
