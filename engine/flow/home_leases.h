// The leases on units that computation uses at their home. An update of a block writes this home,
// so the update waits until no lease on the unit is held, and until the computation under released
// leases has ended. A gradient is final only when the computation of all leases on its unit has
// ended that were released before it. So only leases that are released later are followed to their
// end: behind the gradient that the schedule calls the last, at once; behind another one, when no
// more gradients come.
//
// Thread rule: scheduler's thread only.
// Progress: an update that waits here delays nothing that a held lease waits for.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/plan/placement.h"
#include "engine/run/scheduler.h"

namespace sluice {

// The gradient of a unit that waits for the computation under a lease which has been released.
enum class LeaseGradient : std::uint8_t {
  kOwn,    // the lease's own, which is not final yet
  kLater,  // one that may still come
  kNone,   // the last one has come
};

class HomeLeases {
 public:
  // All arguments must outlive the object. `on_change` runs when an update may have become
  // possible.
  HomeLeases(const FlowParts& parts, std::function<void()> on_change);

  // A step or an inference begins, and the computation of the one before has ended or has been
  // followed.
  void begin() { open_.clear(); }
  // A lease on the unit begins.
  void acquired(UnitId unit);
  // The lease is over; `computed` is recorded behind its computation, and behind that of the unit's
  // leases released before.
  void released(UnitId unit, EventId computed, LeaseGradient gradient);
  // No more gradients come in this step. To be called before that makes a gradient final.
  void no_more_gradients();

  bool may_update(BlockId block) const { return leases_[index_of(layout_.block(block).unit)] == 0; }
  // Whether no computation is followed.
  bool idle() const { return followed_ == 0; }

 private:
  bool counts(UnitId unit) const {
    return placement_.is_leased_at_home(layout_.unit(unit)) && !layout_.unit(unit).is_frozen;
  }
  void follow(UnitId unit, EventId computed);
  void ended(UnitId unit);

  const Layout& layout_;
  const Placement& placement_;
  Device& device_;
  Scheduler& scheduler_;
  std::function<void()> on_change_;
  std::vector<std::uint32_t> leases_;  // by unit: held, or with computation that is followed
  std::uint32_t followed_ = 0;         // released leases
  std::map<UnitId, EventId> open_;     // released behind the unit's last gradient so far
  Stream stream_;                      // last: its callbacks use everything above
};

}  // namespace sluice
