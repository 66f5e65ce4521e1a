// A random part of a file name. Names with such a part are the same by chance alone, also in
// containers whose processes have the same numbers.
//
// Thread rule: any thread.
#pragma once

#include <string>

namespace sluice {

// Returns 16 hexadecimal digits.
// Fails with std::system_error if the kernel has no random numbers.
std::string random_suffix();

}  // namespace sluice
