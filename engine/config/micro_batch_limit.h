// The largest number of micro-batches of a step.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>

namespace sluice {

// The schedule of a step is in memory as a whole.
inline constexpr std::uint32_t kMicroBatchesMax = 65536;

}  // namespace sluice
