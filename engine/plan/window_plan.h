// The bytes of the device window that each use of a unit occupies, and the uses that must fetch.
// This decides the whole residency of a step in advance by Belady's rule (evict the unit that is
// needed last), since the schedule is known. Being a pure function of (schedule, sizes, window), it
// fixes the traffic of a step to the byte, whatever the timing.
//
// With several leases, held units can lie in the way of the next one. If the rule ends there, the
// step is planned again with a retreat: a place for each stay, such that no two units overlap that
// are held at once. A unit may then not be put where the retreat has units that come while it is
// held, so the next one always finds room, if only in its retreat. Two leases need no more memory
// than the two units: stays go to the window's two ends in turn.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/plan/schedule.h"

namespace sluice {

struct WindowUse {
  std::uint64_t offset_bytes = 0;  // of the unit's parameters in the window
  bool fetch = false;              // false: still there from an earlier use, or homed on the device
  // Uses (indices into the schedule) whose units this fetch overwrites, or that had the unit in
  // another place. Each is that unit's last use before, and must have been released and computed
  // before a copy may start.
  std::vector<std::uint32_t> evicted_uses;
};

// A unit's place in the window.
struct WindowResident {
  std::uint32_t unit = 0;
  std::uint64_t begin_bytes = 0;
  std::uint64_t end_bytes = 0;
  std::uint32_t last_use = 0;  // kNever: fetched ahead for a use that did not come

  static constexpr std::uint32_t kNever = UINT32_MAX;
};

struct WindowPlan {
  std::vector<WindowUse> uses;  // one per entry of the schedule
  // After the schedule's last change: the first use planned then, and the units in the window.
  std::uint32_t first_use = 0;
  std::vector<WindowResident> residents;  // by place
};

// How far a step has come when its schedule changes.
struct WindowProgress {
  std::uint32_t acquired = 0;      // uses
  std::uint32_t fetched = 0;       // uses whose fetches, if any, have all been issued
  bool is_partly_fetched = false;  // some blocks of the next use have been fetched
};

// `unit_bytes[u]` is the bytes of unit u in the window, 0 for a unit homed on the device. Uses k -
// concurrent_leases + 1 .. k - 1 are still held when use k is acquired, so their units stay. Works
// for every window of at least least_window_bytes().
// Fails with: kOutOfMemory when the window cannot hold the leases of some use, naming the bytes
// that would suffice.
WindowPlan plan_window(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                       std::uint64_t window_bytes, std::uint32_t concurrent_leases);

// The same for a changed schedule: `changed` equals `schedule`, which `plan` was made for, up to
// `progress.acquired`. Units fetched ahead stay where they are for as long as they may be needed.
// Fails as plan_window(); with several leases also when held units lie in the way.
WindowPlan replan_window(const Schedule& schedule, const WindowPlan& plan,
                         const WindowProgress& progress, const Schedule& changed,
                         std::span<const std::uint64_t> unit_bytes, std::uint64_t window_bytes,
                         std::uint32_t concurrent_leases);

// The smallest window that plan_window() accepts; it accepts every larger one, too. With one or two
// leases it is leased_bytes_max(), and nearly always with more: finding the places that then waste
// the fewest bytes would mean trying all of them.
std::uint64_t least_window_bytes(const Schedule& schedule,
                                 std::span<const std::uint64_t> unit_bytes,
                                 std::uint32_t concurrent_leases);

// The largest sum of the distinct units in `leases` consecutive uses: a window for that many leases
// is at least as large.
std::uint64_t leased_bytes_max(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                               std::uint32_t leases);

}  // namespace sluice
