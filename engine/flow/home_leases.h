// The leases on units that computation uses at their home. An update of a block writes this home,
// so the update waits until no lease on the unit is held, and until the computation under released
// leases has ended. A gradient that is final already stands for the computation of all leases on
// its unit that were released before. So only leases that end later are followed to their end.
//
// Thread rule: scheduler's thread only.
// Progress: an update that waits here delays nothing that a held lease waits for.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/plan/placement.h"
#include "engine/run/scheduler.h"

namespace sluice {

class HomeLeases {
 public:
  // All arguments must outlive the object. `on_change` runs when an update may have become
  // possible.
  HomeLeases(const FlowParts& parts, std::function<void()> on_change);

  // A lease on the unit begins.
  void acquired(UnitId unit);
  // The lease is over; `computed` is recorded behind its computation. With `is_covered`, a gradient
  // of the unit that is not final yet waits for this computation anyway.
  void released(UnitId unit, EventId computed, bool is_covered);

  bool may_update(BlockId block) const { return leases_[index_of(layout_.block(block).unit)] == 0; }
  // Whether no computation is followed.
  bool idle() const { return followed_ == 0; }

 private:
  bool counts(UnitId unit) const {
    return placement_.is_leased_at_home(layout_.unit(unit)) && !layout_.unit(unit).is_frozen;
  }
  void ended(UnitId unit);

  const Layout& layout_;
  const Placement& placement_;
  Device& device_;
  Scheduler& scheduler_;
  std::function<void()> on_change_;
  std::vector<std::uint32_t> leases_;  // by unit: held, or with computation that is followed
  std::uint32_t followed_ = 0;         // released leases
  Stream stream_;                      // last: its callbacks use everything above
};

}  // namespace sluice
