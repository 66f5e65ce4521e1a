// For each use of a unit, the plan says which bytes of the device window the unit occupies. The
// plan also says which uses must fetch their unit. The schedule is known, so the plan decides in
// advance when each unit is in the window. Belady's rule chooses the unit that is evicted. The
// chosen unit is the one with the latest next use. The plan is a pure function of (schedule, sizes,
// window). So the plan determines the exact bytes that a step moves, and timing has no influence on
// these bytes.
//
// If several leases are held, their units can occupy the place that the next unit needs. If
// Belady's rule fails because of held units, the step is planned again with a retreat. A stay is
// the time that a unit spends in the window. A retreat reserves a place for each stay. The places
// of units that are held at the same time never overlap. In a plan with a retreat, other units may
// enter the window while a unit is held. The held unit avoids the reserved places of these other
// units. So the next unit always has room, at least in its own reserved place. With two leases,
// units are placed alternately at the two ends of the window. So the window is large enough if it
// can hold any two units that are used one after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/plan/schedule.h"

namespace sluice {

struct WindowUse {
  std::uint64_t offset_bytes = 0;  // of the unit's parameters in the window
  bool fetch = false;              // false: the unit is already there, or homed on the device
  // The entries are indices into the schedule. Some entries are uses of the units that this fetch
  // overwrites. The other entries are uses of this unit at another place in the window. Each entry
  // is the latest use of its unit before this use. All uses in the list must have been released and
  // computed before a copy may start.
  std::vector<std::uint32_t> evicted_uses;
};

// A unit's place in the window.
struct WindowResident {
  std::uint32_t unit = 0;
  std::uint64_t begin_bytes = 0;
  std::uint64_t end_bytes = 0;
  std::uint32_t last_use = 0;  // kNever if fetched for a use that did not come

  static constexpr std::uint32_t kNever = UINT32_MAX;
};

struct WindowPlan {
  std::vector<WindowUse> uses;  // one per entry of the schedule
  // first_use is the first use that was planned when the schedule last changed. `residents` lists
  // the units that were in the window at that time.
  std::uint32_t first_use = 0;
  std::vector<WindowResident> residents;  // by place
  std::uint64_t places_judged = 0;        // number of places considered; the cost of planning
};

// The progress of a step at the time when the schedule changes.
struct WindowProgress {
  std::uint32_t acquired = 0;      // uses
  std::uint32_t fetched = 0;       // uses whose fetches, if any, have all been issued
  bool is_partly_fetched = false;  // some blocks of the next use have been fetched
  // Units of the last uses whose leases have ended, although the schedule would let them last.
  std::vector<std::uint32_t> unleased{};
};

// `unit_bytes[u]` is the size of unit u in the window. The size is 0 for a unit whose home is the
// device. With n concurrent leases, the n - 1 previous uses are still held when a use is acquired,
// so their units stay. A window works if it is not smaller than least_window_bytes().
// Fails with kOutOfMemory if the window is too small for the units that are leased at the same
// time. The message names a number of bytes that would suffice.
WindowPlan plan_window(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                       std::uint64_t window_bytes, std::uint32_t concurrent_leases);

// Does the same as plan_window() for a changed schedule. `plan` was made for `schedule`. The first
// `progress.acquired` uses are the same in `changed` and in `schedule`. Units that have been
// fetched ahead keep their places as long as these units may be needed. If Belady's rule fails, the
// rest is planned with a retreat around the units that are leased.
// Fails with the errors of plan_window(). With several leases, the call also fails if held units
// leave no place for a unit. A window of any_order_window_bytes() never fails.
WindowPlan replan_window(const Schedule& schedule, const WindowPlan& plan,
                         const WindowProgress& progress, const Schedule& changed,
                         std::span<const std::uint64_t> unit_bytes, std::uint64_t window_bytes,
                         std::uint32_t concurrent_leases);

// The smallest window that plan_window() accepts. plan_window() accepts all larger windows, too.
// With one or two leases, the result is leased_bytes_max(). With more leases, the result is nearly
// always leased_bytes_max(), too. In rare cases, the result is larger, because the function does
// not try all places.
std::uint64_t least_window_bytes(const Schedule& schedule,
                                 std::span<const std::uint64_t> unit_bytes,
                                 std::uint32_t concurrent_leases);

// In a window of this size, there is always a place for a unit, wherever the plan has put the
// units that are leased, and whichever they are. The gaps between the leased units cannot all be
// too small.
std::uint64_t any_order_window_bytes(std::span<const std::uint64_t> unit_bytes,
                                     std::uint32_t concurrent_leases);

// For each sequence of `leases` consecutive uses, the function adds up the sizes of the distinct
// units. The result is the largest of these sums. A window that holds this number of leases must be
// at least as large as the result.
std::uint64_t leased_bytes_max(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                               std::uint32_t leases);

}  // namespace sluice
