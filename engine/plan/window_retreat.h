// Places in the device window that a step can always retreat to: one per stay of a unit, such that
// no two units overlap that are held at once. Pure; callable from any thread.
//
// A stay is a unit's time in the window, from a use on for as long as it is held; if used again by
// then, it has to stay in place. With `leases` leases, use k is held until use k + leases.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/plan/schedule.h"

namespace sluice {

// The alignment of every place in the window.
inline constexpr std::uint64_t kWindowAlignBytes = 4096;

struct WindowRetreat {
  std::vector<std::uint64_t> begin_bytes;  // by use
  std::uint64_t window_bytes = 0;          // enough to hold all of them
};

// For two leases, where a stay is held together only with its neighbors: the window's two ends in
// turn. Requires: a window of the largest sum of two neighbors.
WindowRetreat retreat_to_both_ends(const Schedule& schedule,
                                   std::span<const std::uint64_t> unit_bytes,
                                   std::uint64_t window_bytes);

// Each stay goes as low as the stays placed before it allow: by time, by size, or all units side by
// side, whichever takes the least.
WindowRetreat packed_retreat(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                             std::uint32_t leases);

}  // namespace sluice
