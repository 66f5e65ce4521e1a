// Places in the device window that a step can always retreat to: for each stay of a unit one, and
// no two units lie on each other that are held at once. Pure; callable from any thread.
//
// A stay is a unit's time in the window from a use on for as long as it is held: used again by
// then, it has to be where it is. Of `leases` leases, use k is held until use k + leases comes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/plan/schedule.h"

namespace sluice {

// Of every place in the window.
inline constexpr std::uint64_t kWindowAlignBytes = 4096;

struct WindowRetreat {
  std::vector<std::uint64_t> begin_bytes;  // by use
  std::uint64_t window_bytes = 0;          // that hold all of them
};

// For two leases, where a stay is held together with its neighbors alone: the window's two ends in
// turn. Requires: a window of the largest sum of two neighbors.
WindowRetreat retreat_to_both_ends(const Schedule& schedule,
                                   std::span<const std::uint64_t> unit_bytes,
                                   std::uint64_t window_bytes);

// Each stay as low as those allow that are placed before it: by time, by size, or all units side by
// side, whichever takes the least.
WindowRetreat packed_retreat(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                             std::uint32_t leases);

}  // namespace sluice
