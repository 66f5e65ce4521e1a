// The uses that a step announces on the way, and their places in a separate part of the device
// window. All places have the length of the largest announced unit, so that any free place fits any
// of these units. Announcements only add uses: the plan so far, and the schedule of the other
// units, stay as they are. So a step reads exactly the bytes of the units that it announces.
//
// Thread rule: one thread at a time. References stay valid.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <sluice/ids.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/plan/schedule.h"
#include "engine/plan/window_plan.h"

namespace sluice {

class AnnouncedUses {
 public:
  // All arguments must outlive the object. `model` is validated().
  AnnouncedUses(const ModelSpec& model, const Layout& layout, const Placement& placement);

  // Forgets the uses of the step before.
  void begin();
  void add(std::span<const UnitId> units, Pass pass);

  const Schedule& schedule() const { return schedule_; }
  const WindowPlan& window() const { return window_; }
  // The bytes that the fetches of all uses read from storage.
  std::uint64_t read_bytes() const;

 private:
  const Layout& layout_;
  const Placement& placement_;
  const std::uint32_t concurrent_leases_;
  std::vector<std::uint64_t> place_bytes_;  // by unit; 0 where it needs no place
  Schedule schedule_;
  WindowPlan window_;
};

}  // namespace sluice
