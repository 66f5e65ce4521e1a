// A retreat reserves places in the device window, so that every unit of a step has room. Each stay
// of a unit has one place. The places of units that are held at the same time never overlap. The
// functions are pure, and any thread may call them.
//
// A stay is a unit's time in the window, from a use until the unit is no longer held. If a unit is
// used again before the end of its stay, the unit has to keep its place. The use with the number k
// is held until the use with the number k + `leases` is acquired.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/plan/schedule.h"
#include "engine/plan/window_plan.h"

namespace sluice {

// The alignment of every place in the window.
inline constexpr std::uint64_t kWindowAlignBytes = 4096;

struct WindowRetreat {
  std::vector<std::uint64_t> begin_bytes;  // by use
  std::uint64_t window_bytes = 0;          // enough for all places
};

// The stays are put alternately at the two ends of the window. Two ends are enough for two leases,
// because a stay overlaps in time only with the previous stay and the next stay. Requires: the
// window is large enough for any two successive stays.
WindowRetreat retreat_to_both_ends(const Schedule& schedule,
                                   std::span<const std::uint64_t> unit_bytes,
                                   std::uint64_t window_bytes);

// The function puts each stay at the lowest address that is still free. The function makes
// three attempts. The first attempt takes the stays in order of time. The second attempt takes the
// stays in order of size. The third attempt puts all units side by side. The function returns the
// smallest of the three results.
WindowRetreat packed_retreat(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                             std::uint32_t leases);

// A retreat for the uses from `first_use` on, in a step that has come as far as that. The units
// `held` are leased there, and keep their places until their stays end. The result is empty if no
// retreat was found that fits the window.
std::optional<WindowRetreat> retreat_around(std::span<const WindowResident> held,
                                            const Schedule& schedule, std::uint32_t first_use,
                                            std::span<const std::uint64_t> unit_bytes,
                                            std::uint64_t window_bytes, std::uint32_t leases);

}  // namespace sluice
