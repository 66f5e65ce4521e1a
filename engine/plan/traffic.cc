#include "engine/plan/traffic.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace sluice {

void TrafficMeter::pause() {
  for (std::size_t drive = 0; drive < counted_.size(); ++drive) {
    const IoCounters now = queue_.drive_counters(static_cast<std::uint32_t>(drive));
    counted_[drive].read_bytes += now.read_bytes - at_resume_[drive].read_bytes;
    counted_[drive].write_bytes += now.write_bytes - at_resume_[drive].write_bytes;
  }
}

void TrafficMeter::resume() {
  for (std::size_t drive = 0; drive < at_resume_.size(); ++drive)
    at_resume_[drive] = queue_.drive_counters(static_cast<std::uint32_t>(drive));
}

std::vector<DriveTraffic> TrafficMeter::take() {
  pause();
  resume();
  return std::exchange(counted_, std::vector<DriveTraffic>(counted_.size()));
}

std::uint64_t nvme_parameter_bytes(const Layout& layout, const Placement& placement, UnitId unit) {
  std::uint64_t bytes = 0;
  for (const BlockPlace& block : layout.blocks_of(unit)) {
    if (placement.parameter_tier[index_of(block.id)] == Tier::kNvme)
      bytes += layout.parameter_slot_bytes(block.id);
  }
  return bytes;
}

std::uint64_t nvme_update_bytes(const Layout& layout, const Placement& placement, UnitId unit) {
  if (layout.unit(unit).is_frozen) return 0;
  std::uint64_t bytes = nvme_parameter_bytes(layout, placement, unit);
  for (const BlockPlace& block : layout.blocks_of(unit)) {
    if (placement.record_tier[index_of(block.id)] == Tier::kNvme)
      bytes += layout.record_slot_bytes(block.id);
  }
  return bytes;
}

std::vector<bool> updated_units(const Layout& layout, const Placement& placement,
                                const Schedule& schedule) {
  std::vector<bool> is_updated;
  for (const UnitPlace& unit : layout.units())
    is_updated.push_back(!unit.is_frozen && !placement.may_stay(unit));
  for (const ScheduledUse& use : schedule) {
    if (use.pass == Pass::kBackward && !layout.unit(use.unit).is_frozen)
      is_updated[index_of(use.unit)] = true;
  }
  return is_updated;
}

std::uint64_t nvme_gradient_bytes(const Layout& layout, const Placement& placement, UnitId unit) {
  if (layout.unit(unit).is_frozen || placement.gradient_tier[index_of(unit)] != Tier::kNvme)
    return 0;
  std::uint64_t bytes = 0;
  for (const BlockPlace& block : layout.blocks_of(unit))
    bytes += layout.gradient_slot_bytes(block.id);
  return bytes;
}

std::vector<bool> units_with_gradients(const Layout& layout, const Schedule& schedule) {
  std::vector<bool> have_gradients(layout.units().size(), false);
  for (const ScheduledUse& use : schedule) {
    if (use.pass == Pass::kBackward) have_gradients[index_of(use.unit)] = true;
  }
  return have_gradients;
}

std::uint64_t gradient_spill_bytes(const Layout& layout, const Placement& placement,
                                   const Schedule& schedule) {
  std::uint64_t bytes = 0;
  for (const ScheduledUse& use : schedule) {
    if (use.pass == Pass::kBackward) bytes += nvme_gradient_bytes(layout, placement, use.unit);
  }
  return bytes;
}

std::uint64_t zero_spill_bytes(const Layout& layout, const Placement& placement,
                               const Schedule& schedule) {
  const std::vector<bool> have_gradients = units_with_gradients(layout, schedule);
  std::uint64_t bytes = 0;
  for (const UnitPlace& unit : layout.units()) {
    if (!have_gradients[index_of(unit.id)] && !placement.may_stay(unit))
      bytes += nvme_gradient_bytes(layout, placement, unit.id);
  }
  return bytes;
}

Traffic predict_step_traffic(const Layout& layout, const Placement& placement,
                             const Schedule& schedule, const WindowPlan& plan,
                             const ActivationPlan& activations) {
  Traffic traffic;
  for (std::size_t use = 0; use < schedule.size(); ++use) {
    if (plan.uses[use].fetch)
      traffic.nvme_read_bytes += nvme_parameter_bytes(layout, placement, schedule[use].unit);
  }
  const std::vector<bool> is_updated = updated_units(layout, placement, schedule);
  std::uint64_t pass_bytes = 0;
  std::uint64_t record_bytes = 0;
  for (const UnitPlace& unit : layout.units()) {
    if (!is_updated[index_of(unit.id)]) continue;
    const std::uint64_t bytes = nvme_update_bytes(layout, placement, unit.id);
    pass_bytes += bytes;
    record_bytes += bytes - nvme_parameter_bytes(layout, placement, unit.id);
  }
  traffic.nvme_read_bytes += pass_bytes;
  traffic.nvme_write_bytes += pass_bytes;
  traffic.nvme_read_bytes_least =
      placement.kept_slots == 0 ? traffic.nvme_read_bytes : record_bytes;
  // Every gradient except a unit's first is added to the stored sum, and the update reads the sum.
  traffic.gradient_spill_bytes = gradient_spill_bytes(layout, placement, schedule) +
                                 zero_spill_bytes(layout, placement, schedule);
  traffic.nvme_write_bytes += traffic.gradient_spill_bytes;
  traffic.nvme_read_bytes += traffic.gradient_spill_bytes;
  traffic.nvme_read_bytes_least += traffic.gradient_spill_bytes;
  traffic.activation_out_bytes = activations.stored_bytes;
  traffic.activation_in_bytes = activations.fetched_bytes;
  if (placement.nvme_activation_bytes != 0) {
    traffic.nvme_read_bytes += activations.fetched_bytes;
    traffic.nvme_read_bytes_least += activations.fetched_bytes;
    traffic.nvme_write_bytes += activations.stored_bytes;
  }
  return traffic;
}

}  // namespace sluice
