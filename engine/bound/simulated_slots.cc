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

void SimulatedSlots::add_to(SimulatedState& state) const {
  for (const Slot& slot : slots_)
    state.add(std::uint64_t{slot.users} << 3 | std::uint64_t{slot.is_bound} << 2 |
              std::uint64_t{slot.is_valid} << 1 | std::uint64_t{slot.is_kept});
  for (const std::uint32_t count : {free_, kept_, lane_users_}) state.add(count);
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
