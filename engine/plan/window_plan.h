// Which bytes of the device window each use of a unit occupies, and which uses must fetch: the
// whole residency of a step, decided in advance by Belady's rule (evict what is needed last), since
// the schedule is known. Being a pure function of (schedule, sizes, window), it fixes the traffic
// of a step to the byte, whatever the timing.
//
// With several leases units that are held can lie in the way of the next one. Where the rule ends
// in such a place, the step is planned again with a retreat: places, by stay, in which no two units
// lie on each other that are held at once. No unit may then be put where the retreat has those that
// come while it is held, so the next one always finds room, if only in its retreat. Two leases need
// no more than the two units: stays go to the window's two ends in turn.
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
  // another place: each is that unit's last use before, and must have been released and computed
  // before a copy may start.
  std::vector<std::uint32_t> evicted_uses;
};

// A unit's place in the window.
struct WindowResident {
  std::uint32_t unit = 0;
  std::uint64_t begin_bytes = 0;
  std::uint64_t end_bytes = 0;
  std::uint32_t last_use = 0;  // kNever: it was fetched ahead for a use that did not come

  static constexpr std::uint32_t kNever = UINT32_MAX;
};

struct WindowPlan {
  std::vector<WindowUse> uses;  // one for each entry of the schedule
  // Where the schedule has changed last: the first use planned then, and who was there.
  std::uint32_t first_use = 0;
  std::vector<WindowResident> residents;  // by place
};

// How far a schedule has come when it changes.
struct WindowProgress {
  std::uint32_t acquired = 0;      // uses
  std::uint32_t fetched = 0;       // uses whose fetches have been issued in full, if they had any
  bool is_partly_fetched = false;  // of the next use, some blocks have been fetched
};

// `unit_bytes[u]` is what unit u needs in the window, 0 for a unit homed on the device. Uses k -
// concurrent_leases + 1 .. k - 1 are still held when use k is acquired, so their units stay. Works
// for every window of at least least_window_bytes().
// Fails with: kOutOfMemory when the window cannot hold the leases of some use, naming the bytes
// that would.
WindowPlan plan_window(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                       std::uint64_t window_bytes, std::uint32_t concurrent_leases);

// The same for a schedule that has changed: `changed` equals `schedule`, which `plan` was made for,
// up to `progress.acquired`. What has been fetched ahead stays where it is for as long as it may be
// wanted. Fails as plan_window(); with several leases also when what is held lies in the way.
WindowPlan replan_window(const Schedule& schedule, const WindowPlan& plan,
                         const WindowProgress& progress, const Schedule& changed,
                         std::span<const std::uint64_t> unit_bytes, std::uint64_t window_bytes,
                         std::uint32_t concurrent_leases);

// The smallest window that plan_window() answers for, and with it for every larger one. With one
// lease or two it is leased_bytes_max(), as it nearly always is with more: but which places waste
// the fewest bytes then, only trying all of them would tell.
std::uint64_t least_window_bytes(const Schedule& schedule,
                                 std::span<const std::uint64_t> unit_bytes,
                                 std::uint32_t concurrent_leases);

// The largest sum of the distinct units in `leases` consecutive uses: no window that holds so many
// leases at a time is smaller.
std::uint64_t leased_bytes_max(const Schedule& schedule, std::span<const std::uint64_t> unit_bytes,
                               std::uint32_t leases);

}  // namespace sluice
