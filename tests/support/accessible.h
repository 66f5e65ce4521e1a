// Whether this process may read or write an address. The kernel is asked, so that an address that
// is not accessible is an answer and not a crash.
#pragma once

#include <cstddef>

namespace sluice::test {

bool is_readable(const std::byte* address);
// The byte keeps its value. Requires: no other thread writes it meanwhile.
bool is_writable(std::byte* address);

}  // namespace sluice::test
