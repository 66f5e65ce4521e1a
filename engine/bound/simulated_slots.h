// Simulates the parameter slots for the bound, by the rules of engine/flow/parameter_slots.h. A
// block has at most one slot. The fetches and the lanes share this slot. One slot is reserved for
// each lane. Some slots may keep their bytes for a later user. If several users leave at the same
// instant, they leave in a fixed order, after all other events of this instant.
//
// Thread rule: one thread, because one simulation owns the object.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "engine/bound/simulated_state.h"
#include "engine/plan/placement.h"

namespace sluice {

enum class SimulatedUser : std::uint8_t { kFetch, kLane };

class SimulatedSlots {
 public:
  SimulatedSlots(const Placement& placement, std::size_t block_count);

  // is_bound() says whether the block has a slot, and is_valid() says whether this slot has the
  // block's bytes.
  bool is_bound(std::uint32_t block) const { return slots_[block].is_bound; }
  bool is_valid(std::uint32_t block) const { return slots_[block].is_valid; }
  void set_valid(std::uint32_t block) { slots_[block].is_valid = true; }

  // Adds a user to the block's slot. If the block has no slot, the call binds a free slot to the
  // block. Returns false if no slot is available now.
  bool take(std::uint32_t block, SimulatedUser user);

  // The next settle() removes a user of the block's slot. `keep` is true if the bytes will be used
  // again.
  void leave(std::uint32_t block, SimulatedUser user, bool keep) {
    leaving_.emplace_back(user, block, keep);
  }
  // Requires: no user is leaving.
  void add_to(SimulatedState& state) const;

  // Removes all users that are leaving. Returns false if no user is leaving.
  bool settle();

 private:
  struct Slot {
    std::uint32_t users = 0;
    bool is_bound = false;
    bool is_valid = false;
    bool is_kept = false;
  };

  std::vector<Slot> slots_;  // by block
  std::uint32_t reserve_;
  std::uint32_t kept_max_;
  std::uint32_t free_;
  std::uint32_t kept_ = 0;
  std::uint32_t lane_users_ = 0;
  std::vector<std::tuple<SimulatedUser, std::uint32_t, bool>> leaving_;
};

}  // namespace sluice
