#include "engine/traffic.h"

namespace sluice {

std::uint64_t nvme_parameter_bytes(const Layout& layout, const Placement& placement, UnitId unit) {
  std::uint64_t bytes = 0;
  for (const BlockPlace& block : layout.blocks_of(unit)) {
    if (placement.parameter_tier[index_of(block.id)] == Tier::kNvme)
      bytes += layout.parameter_slot_bytes(block.id);
  }
  return bytes;
}

Traffic predict_step_traffic(const Layout& layout, const Placement& placement,
                             const Schedule& schedule, const WindowPlan& plan) {
  Traffic traffic;
  for (std::size_t use = 0; use < schedule.size(); ++use) {
    if (plan.uses[use].fetch)
      traffic.nvme_read_bytes += nvme_parameter_bytes(layout, placement, schedule[use].unit);
  }
  const std::uint64_t pass_bytes = placement.nvme_parameter_bytes + placement.nvme_record_bytes;
  traffic.nvme_read_bytes += pass_bytes;
  traffic.nvme_write_bytes += pass_bytes;
  // Each block's parameters may be spared one fetch and the read for the update.
  traffic.nvme_read_bytes_least =
      placement.kept_slots == 0 ? traffic.nvme_read_bytes
                                : traffic.nvme_read_bytes - 2 * placement.nvme_parameter_bytes;
  return traffic;
}

}  // namespace sluice
