// The arithmetic of one block's update: the optimizer over all its elements, with each tensor's own
// coefficients, wherever the block's planes lie at the moment.
//
// Thread rule: worker's thread. Distinct blocks are independent.
#pragma once

#include <cstdint>

#include "cpu_optim/cpu_optimizer.h"
#include "engine/layout.h"
#include "engine/parameter_groups.h"

namespace sluice {

// The planes of one block in host memory; parameters and record are updated in place.
struct BlockPlanes {
  std::byte* parameters = nullptr;
  std::byte* record = nullptr;
  const std::byte* gradients = nullptr;
};

// Makes update `step` (for messages: the number of the step) of `block`.
// Fails with: kNonFinite naming tensor and element when a weight overflows; the planes are then
// partly updated and must not be stored.
void update_block(const Layout& layout, const BlockPlace& block, const BlockPlanes& planes,
                  const StepCoefficients& coefficients, std::uint64_t step,
                  CpuOptimizer& optimizer);

}  // namespace sluice
