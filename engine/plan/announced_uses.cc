#include "engine/plan/announced_uses.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>
#include "engine/plan/traffic.h"

namespace sluice {
namespace {

constexpr std::uint32_t kNeverUsed = UINT32_MAX;

}  // namespace

AnnouncedUses::AnnouncedUses(const ModelSpec& model, const Layout& layout,
                             const Placement& placement, AnnouncedKind kind)
    : layout_(layout),
      placement_(placement),
      concurrent_leases_(model.concurrent_leases),
      first_place_(placement.first_announced_place(kind)),
      places_(placement.announced_places()),
      next_uses_(layout.units().size(), kNeverUsed) {}

void AnnouncedUses::begin() {
  schedule_.clear();
  window_ = {};
  places_.assign(places_.size(), {});
}

void AnnouncedUses::add(std::span<const UnitId> units, Pass pass) {
  auto next = static_cast<std::uint32_t>(schedule_.size());
  for (const UnitId unit : units) next_uses_[index_of(unit)] = next++;
  for (const UnitId unit : units) {
    next_uses_[index_of(unit)] = kNeverUsed;
    window_.uses.push_back(use_of(unit));
    schedule_.push_back({.unit = unit, .pass = pass});
  }
}

// A unit that is leased at home, on the device or in host memory, needs no place.
WindowUse AnnouncedUses::use_of(UnitId unit) {
  if (placement_.is_leased_at_home(layout_.unit(unit))) return {};
  const auto use = static_cast<std::uint32_t>(schedule_.size());
  WindowUse planned;
  const auto found = std::ranges::find(places_, std::optional(unit), &Place::unit);
  Place& place = found == places_.end() ? place_for(use) : *found;
  planned.offset_bytes = (first_place_ + static_cast<std::uint64_t>(&place - places_.data())) *
                         placement_.announced_window.slot_bytes;
  planned.fetch = found == places_.end();
  if (planned.fetch && place.unit) planned.evicted_uses.push_back(place.last_use);
  place = {.unit = unit, .last_use = use};
  return planned;
}

// An empty place, or one whose unit no lease holds when `use` comes.
AnnouncedUses::Place& AnnouncedUses::place_for(std::uint32_t use) {
  Place* best = nullptr;
  for (Place& place : places_) {
    if (!place.unit) return place;
    if (place.last_use + concurrent_leases_ > use) continue;
    const auto wanted = [this](const Place& of) {  // the latest next use, then the earliest last
      return std::pair(next_uses_[index_of(*of.unit)], ~of.last_use);
    };
    if (best == nullptr || wanted(place) > wanted(*best)) best = &place;
  }
  SLUICE_CHECK(best != nullptr, "there are as many places as leases");
  return *best;
}

std::uint64_t AnnouncedUses::read_bytes() const {
  std::uint64_t bytes = 0;
  for (std::size_t use = 0; use < schedule_.size(); ++use) {
    if (window_.uses[use].fetch)
      bytes += nvme_parameter_bytes(layout_, placement_, schedule_[use].unit);
  }
  return bytes;
}

std::uint64_t AnnouncedUses::update_bytes() const {
  const std::vector<bool> have_gradients = units_with_gradients(layout_, schedule_);
  std::uint64_t bytes = gradient_spill_bytes(layout_, placement_, schedule_);
  for (const UnitPlace& unit : layout_.units()) {
    if (!have_gradients[index_of(unit.id)]) continue;
    if (placement_.may_stay(unit)) {
      bytes += nvme_update_bytes(layout_, placement_, unit.id);
    } else {
      // The first gradient takes the place of the zeros of which the prediction knows.
      bytes -= nvme_gradient_bytes(layout_, placement_, unit.id);
    }
  }
  return bytes;
}

}  // namespace sluice
