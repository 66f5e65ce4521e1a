// The number of batches in each evaluation of the toy training.
#pragma once

#include <cstdint>

namespace sluice::test {

inline constexpr std::uint32_t kEvaluatedBatches = 3;

}  // namespace sluice::test
