// The cost of a planned step that has very many blocks. Neighboring blocks of a unit have the same
// size and the same homes. So the simulation merges `factor` neighboring blocks into one block that
// is `factor` times as large. Every buffer keeps its size in bytes. The latency of a storage
// request is `factor` times as long for a merged block as for a single block. So the merged step is
// a coarser version of the true step. In tests, the time of the merged step is within 1 % of the
// true time. The function is pure, and any thread may call it.
#pragma once

#include <cstdint>

#include "engine/bound/step_cost.h"
#include "engine/plan/activation_plan.h"

namespace sluice {

// A step with at most this many blocks is simulated block by block.
inline constexpr std::uint64_t kBlocksSimulatedMax = 32 << 10;

// All members must outlive the call.
struct BlockSteps {
  ActivationShape step;
  const Layout& layout;
  const Placement& placement;  // of `layout`
  std::uint32_t commit_every = 1;
};

// Returns T_bound of `policy`, which is not kAuto. The simulation has at most `blocks_max` blocks.
// If there are more than `blocks_max` units, the simulation has one block per unit.
StepCost bound_of_blocks(const BlockSteps& steps, const Rates& rates, OverlapPolicy policy,
                         std::uint64_t blocks_max = kBlocksSimulatedMax);

}  // namespace sluice
