// This class plans the uses that are announced while a step runs. These uses get places in a
// separate part of the device window. All places have the length of the largest announced unit, so
// that every announced unit fits into every free place. Announcements only add uses. Announcements
// change neither the earlier plan nor the schedule of the other units. So a step reads exactly the
// bytes of the announced units. A new unit takes the place of a unit that has no later use in the
// same announcement. If several units have no later use, the unit that was used longest ago gives
// up its place. If every unit has a later use, the unit that will not be needed for the longest
// time gives up its place. The time for an announcement grows with the number of announced units,
// but not with the number of earlier uses.
//
// Thread rule: one thread at a time. Every reference that a function has returned stays valid.
#pragma once

#include <cstdint>
#include <optional>
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
  // All arguments must outlive the object. `model` is a result of validated(). The object plans
  // only the announced units that have the kind `kind`. With one rank, all units are of the kind
  // kShared.
  AnnouncedUses(const ModelSpec& model, const Layout& layout, const Placement& placement,
                AnnouncedKind kind = AnnouncedKind::kShared);

  // Forgets the uses of the previous step.
  void begin();
  // Adds one use of each unit. Requires: no unit is given twice.
  void add(std::span<const UnitId> units, Pass pass);

  const Schedule& schedule() const { return schedule_; }
  const WindowPlan& window() const { return window_; }
  // Returns the number of bytes that are fetched from storage for all uses.
  std::uint64_t read_bytes() const;
  // Returns the bytes that the step reads from storage because of announced uses in backward,
  // beside those of read_bytes() and of predict_step_traffic(). The step writes the same number of
  // bytes. If gradients wait on storage, each further gradient of a unit counts. If steps skip
  // unused units (Placement::skips_untouched) or update them late (Placement::is_lazy), the first
  // gradient and the update of a used unit count, too.
  std::uint64_t update_bytes() const;

 private:
  struct Place {
    std::optional<UnitId> unit;
    std::uint32_t last_use = 0;
  };

  WindowUse use_of(UnitId unit);
  Place& place_for(std::uint32_t use);

  const Layout& layout_;
  const Placement& placement_;
  const std::uint32_t concurrent_leases_;
  const std::uint32_t first_place_;
  std::vector<Place> places_;
  std::vector<std::uint32_t> next_uses_;  // by unit: its use that add() has not planned yet
  Schedule schedule_;
  WindowPlan window_;
};

}  // namespace sluice
