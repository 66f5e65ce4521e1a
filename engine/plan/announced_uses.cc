#include "engine/plan/announced_uses.h"

#include <utility>

#include "engine/plan/traffic.h"

namespace sluice {

AnnouncedUses::AnnouncedUses(const ModelSpec& model, const Layout& layout,
                             const Placement& placement)
    : layout_(layout), placement_(placement), concurrent_leases_(model.concurrent_leases) {
  for (const UnitPlace& unit : layout.units())
    place_bytes_.push_back(
        placement.is_leased_at_home(unit) ? 0 : placement.announced_window.slot_bytes);
}

void AnnouncedUses::begin() {
  schedule_.clear();
  window_ = {};
}

// The places of the uses so far are those of a step that has come to their end.
void AnnouncedUses::add(std::span<const UnitId> units, Pass pass) {
  const auto count = static_cast<std::uint32_t>(schedule_.size());
  Schedule longer = schedule_;
  for (const UnitId unit : units) longer.push_back({.unit = unit, .pass = pass});
  window_ =
      replan_window(schedule_, window_, {.acquired = count, .fetched = count}, longer, place_bytes_,
                    placement_.announced_window.size_bytes(), concurrent_leases_);
  schedule_ = std::move(longer);
}

std::uint64_t AnnouncedUses::read_bytes() const {
  std::uint64_t bytes = 0;
  for (std::size_t use = 0; use < schedule_.size(); ++use) {
    if (window_.uses[use].fetch)
      bytes += nvme_parameter_bytes(layout_, placement_, schedule_[use].unit);
  }
  return bytes;
}

}  // namespace sluice
