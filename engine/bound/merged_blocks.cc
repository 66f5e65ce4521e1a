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

struct MergedBuffers {
  std::uint32_t lanes = 0;
  std::uint32_t staging = 0;
  // The bytes in these buffers, divided by those in the single blocks' buffers. As many times as
  // long, the latency of a request bounds the rate of full buffers as it bounds that of single
  // blocks: 4 lanes of 100 us move as many bytes as 4 lanes of 32 times the bytes and the latency.
  double latency_factor = 1;
};

MergedBuffers merged_buffers(std::uint32_t factor, const Placement& placement) {
  const std::uint32_t lanes = placement.lanes.count;
  const std::uint32_t staging =
      placement.parameter_slots.count - std::min(placement.parameter_slots.count, lanes);
  MergedBuffers merged{.lanes = merged_count(lanes, factor, kLanesLeast),
                       .staging = merged_count(staging, factor, kStagingLeast)};
  const auto lengthen = [&](std::uint32_t count, std::uint32_t single) {
    if (single != 0)
      merged.latency_factor =
          std::max(merged.latency_factor, static_cast<double>(count) * factor / single);
  };
  lengthen(merged.lanes, lanes);
  lengthen(merged.staging, staging);
  return merged;
}

// Each merged block has the homes of the block in its middle: homes change only a few times along
// the blocks.
Placement merged_placement(const Layout& layout, const Placement& placement, const Layout& merged,
                           const MergedBuffers& buffers) {
  Placement result = placement;
  result.lanes.count = buffers.lanes;
  result.parameter_slots.count =
      buffers.staging +
      (std::min(placement.parameter_slots.count, placement.lanes.count) == 0 ? 0 : buffers.lanes);
  result.kept_slots =
      std::min(placement.kept_slots, buffers.staging - std::min(buffers.staging, 1u));
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
  const MergedBuffers buffers = merged_buffers(factor, steps.placement);
  const Placement placement = merged_placement(layout, steps.placement, merged, buffers);
  Rates slower = rates;
  slower.latency_s *= buffers.latency_factor;
  const PlannedStep step(steps.step, merged, placement, steps.commit_every);
  return bound_step(step.shape(slower), policy);
}

}  // namespace sluice
