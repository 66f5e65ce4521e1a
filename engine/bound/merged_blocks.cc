#include "engine/bound/merged_blocks.h"

#include <algorithm>

#include "engine/bound/bound.h"
#include "engine/bound/planned_step.h"

namespace sluice {
namespace {

// Fewer lanes than this could not read, update and write at the same time, which single blocks can.
constexpr std::uint32_t kLanesLeast = 4;
// With fewer staging slots, reads would wait for copies, which single blocks do not.
constexpr std::uint32_t kStagingLeast = 4;

std::uint32_t merged_count(std::uint32_t count, std::uint32_t factor, std::uint32_t least) {
  return std::max(count / factor, std::min(count, least));
}

void merge_buffers(std::uint32_t factor, Placement& placement) {
  const std::uint32_t slots_of_lanes =
      std::min(placement.parameter_slots.count, placement.lanes.count);
  const std::uint32_t staging =
      merged_count(placement.parameter_slots.count - slots_of_lanes, factor, kStagingLeast);
  placement.lanes.count = merged_count(placement.lanes.count, factor, kLanesLeast);
  placement.parameter_slots.count = staging + (slots_of_lanes == 0 ? 0 : placement.lanes.count);
  placement.kept_slots = std::min(placement.kept_slots, staging - std::min(staging, 1u));
}

// Each merged block has the homes of the block in its middle: homes change only a few times along
// the blocks.
Placement merged_placement(const Layout& layout, const Placement& placement, const Layout& merged,
                           std::uint32_t factor) {
  Placement result = placement;
  merge_buffers(factor, result);
  result.parameter_tier.resize(merged.blocks().size());
  result.record_tier.resize(merged.blocks().size());
  for (const BlockPlace& block : merged.blocks()) {
    const UnitPlace& unit = layout.unit(block.unit);
    const std::uint64_t middle =
        block.offset_elements - unit.shard_begin + (block.element_count - 1) / 2;
    const std::uint64_t single = unit.first_block + middle / layout.block_elements();
    result.parameter_tier[index_of(block.id)] = placement.parameter_tier[single];
    result.record_tier[index_of(block.id)] = placement.record_tier[single];
  }
  return result;
}

}  // namespace

StepCost bound_of_blocks(const BlockSteps& steps, const Rates& rates, OverlapPolicy policy,
                         std::uint64_t blocks_max) {
  const Layout& layout = steps.layout;
  // A power of two divides the buffers without a rest in most cases.
  std::uint32_t factor = 1;
  while (layout.blocks().size() > factor * blocks_max) factor *= 2;
  if (factor == 1) {
    const PlannedStep step(steps.step, layout, steps.placement, steps.commit_every);
    return bound_step(step.shape(rates), policy);
  }
  const Layout merged(steps.step.model, layout.format(), factor * layout.block_elements(), {},
                      layout.shard());
  const Placement placement = merged_placement(layout, steps.placement, merged, factor);
  Rates slower = rates;
  slower.latency_s *= factor;
  const PlannedStep step(steps.step, merged, placement, steps.commit_every);
  return bound_step(step.shape(slower), policy);
}

}  // namespace sluice
