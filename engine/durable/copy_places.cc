#include "engine/durable/copy_places.h"

#include "engine/plan/striping.h"

namespace sluice {

std::uint64_t copy_bytes(const Layout& layout, std::uint32_t plane) {
  const BlockId block{plane / 2};
  return plane % 2 == 0 ? layout.parameter_slot_bytes(block) : layout.record_slot_bytes(block);
}

CopyPlaces place_copies(const Layout& layout, const Placement& placement,
                        std::span<const double> weights) {
  const Striping striping = plan_striping(layout, placement, weights);
  DriveDealer others(weights);
  CopyPlaces places;
  places.planes.resize(2 * layout.blocks().size());
  places.file_bytes.resize(weights.size(), 0);
  for (const BlockPlace& block : layout.blocks()) {
    const std::uint32_t i = index_of(block.id);
    const bool is_on_storage =
        placement.parameter_tier[i] == Tier::kNvme || placement.record_tier[i] == Tier::kNvme;
    const std::uint64_t block_bytes = copy_bytes(layout, 2 * i) + copy_bytes(layout, 2 * i + 1);
    const std::uint32_t file = is_on_storage ? striping.drive[i] : others.deal(block_bytes);
    const std::uint32_t copies = layout.is_frozen(block.id) ? 1 : placement.durable_copies;
    for (std::uint32_t copy = 0; copy < copies; ++copy) {
      for (const std::uint32_t index : {2 * i, 2 * i + 1}) {
        CommitPlane& plane = places.planes[index];
        plane.length_bytes = copy_bytes(layout, index);
        if (plane.length_bytes == 0) continue;
        plane.copies[plane.copy_count++] = {.file = file, .offset_bytes = places.file_bytes[file]};
        places.file_bytes[file] += plane.length_bytes;
      }
    }
  }
  return places;
}

}  // namespace sluice
