// This file tells which of the compiled instruction sets the processor has.
#pragma once

#include <cstdint>

namespace sluice {

// Returns Highway's bits for the sets among SSE4, AVX2 and AVX3 of which the processor and the
// operating system support every instruction that the compiler may use for the set. Returns 0 on
// other than x86 processors, where the set that every processor has is the only one compiled.
std::int64_t supported_instruction_sets();

}  // namespace sluice
