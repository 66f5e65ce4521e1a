#include "engine/bound/simulated_slots.h"

#include <algorithm>

namespace sluice {

SimulatedSlots::SimulatedSlots(const Placement& placement, std::size_t block_count)
    : slots_(block_count),
      reserve_(placement.lanes.count),
      kept_max_(placement.kept_slots),
      free_(placement.parameter_slots.count) {}

bool SimulatedSlots::take(std::uint32_t block, SimulatedUser user) {
  Slot& slot = slots_[block];
  if (!slot.is_bound) {
    const std::uint32_t reserved =
        user == SimulatedUser::kLane ? 0 : reserve_ - std::min(reserve_, lane_users_);
    if (free_ <= reserved) return false;
    --free_;
    slot = {.is_bound = true};
  }
  if (slot.is_kept) --kept_;
  slot.is_kept = false;
  ++slot.users;
  if (user == SimulatedUser::kLane) ++lane_users_;
  return true;
}

bool SimulatedSlots::settle() {
  if (leaving_.empty()) return false;
  std::ranges::sort(leaving_);
  for (const auto& [user, block, keep] : leaving_) {
    Slot& slot = slots_[block];
    --slot.users;
    if (user == SimulatedUser::kLane) --lane_users_;
    if (slot.users != 0) continue;
    if (keep && kept_ < kept_max_ && free_ + lane_users_ >= reserve_) {
      slot.is_kept = true;
      ++kept_;
    } else {
      slot = {};
      ++free_;
    }
  }
  leaving_.clear();
  return true;
}

}  // namespace sluice
