// The cost of a planned step that has very many blocks. Neighbouring blocks of a unit have the same
// size and the same homes. So `factor` neighbouring blocks are simulated as one block of `factor`
// times the size. The buffers keep their bytes, and a storage request of a merged block has
// `factor` times the latency. So the merged step is a coarser version of the true step. In tests,
// the time of the merged step is within 1 % of the true time. Pure; callable from any thread.
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

// T_bound of `policy` (not kAuto). A simulation has at most `blocks_max` blocks, or one for each
// unit if there are more units.
StepCost bound_of_blocks(const BlockSteps& steps, const Rates& rates, OverlapPolicy policy,
                         std::uint64_t blocks_max = kBlocksSimulatedMax);

}  // namespace sluice
