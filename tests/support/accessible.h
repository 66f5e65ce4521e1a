// These functions return whether this process may read or write an address. The functions ask the
// kernel. So an inaccessible address does not cause a crash.
#pragma once

#include <cstddef>

namespace sluice::test {

bool is_readable(const std::byte* address);
// The byte at `address` keeps its value. Requires: no other thread writes this byte during the
// call.
bool is_writable(std::byte* address);

}  // namespace sluice::test
