// Computation uses some units directly at the units' homes. This class watches the leases on units
// that are used at home. An update of a block writes to the block's home. So the update waits until
// no lease on the block's unit is held, and until the computation under released leases has ended.
// A unit's gradient becomes final only after the computation under all earlier leases on the unit
// has ended. So this class follows only the leases that come after the unit's last gradient. "To
// follow a lease" means to wait for the end of the computation under this lease. If the unit's last
// gradient of the schedule has come, a released lease is followed at once. If the unit's last
// gradient has not come yet, a released lease is followed when no more gradients can come.
//
// Thread rule: scheduler's thread only.
// Progress: if this class delays an update, no held lease waits for this update.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/plan/placement.h"
#include "engine/run/scheduler.h"

namespace sluice {

// Says how a unit's gradient depends on the computation under a released lease.
enum class LeaseGradient : std::uint8_t {
  kOwn,    // the lease has a gradient, which is not final yet
  kLater,  // the lease has no gradient, but a later lease may have one
  kNone,   // the unit's last gradient has come
};

class HomeLeases {
 public:
  // All arguments must outlive the object. `on_change` runs when the result of may_update() may
  // have changed.
  HomeLeases(const FlowParts& parts, std::function<void()> on_change);

  // Called when a step or an inference begins. Requires: the computation of the previous step or
  // inference has ended, or this object is waiting for its end.
  void begin() { open_.clear(); }
  // Called when a lease on the unit begins.
  void acquired(UnitId unit);
  // Called when a lease has been released. The event `computed` occurs when the computation under
  // this lease has ended. When the event `computed` occurs, the computation under all earlier
  // released leases of the unit has ended, too.
  void released(UnitId unit, EventId computed, LeaseGradient gradient);
  // Called when no more gradients come in this step. Must be called before GradientDrain::close()
  // makes the present gradients final.
  void no_more_gradients();

  bool may_update(BlockId block) const { return leases_[index_of(layout_.block(block).unit)] == 0; }
  // Returns whether this object follows no computation.
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
  std::vector<std::uint32_t> leases_;  // by unit: number of leases that are held or followed
  std::uint32_t followed_ = 0;         // number of released leases being followed
  std::map<UnitId, EventId> open_;     // leases released after the unit's last gradient so far
  Stream stream_;                      // last member, because its callbacks use all others
};

}  // namespace sluice
