// The leases on units that computation uses at the units' homes. An update of a block writes to the
// block's home, so the update waits until no lease on the unit is held, and until the computation
// under released leases has ended. A gradient becomes final only when the computation under all
// earlier leases has ended. So only the computation under later leases is followed here. Once the
// schedule's last gradient has come, a lease is followed as soon as it is released. After any other
// gradient, leases are followed when no more gradients come.
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

// How a unit's gradient depends on the computation under a released lease.
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

  // Called when a step or an inference begins. The computation of the previous step or inference
  // has ended, or is followed.
  void begin() { open_.clear(); }
  // Called when a lease on the unit begins.
  void acquired(UnitId unit);
  // Called when a lease is over. `computed` occurs after the lease's computation, and after the
  // computation of the unit's leases that were released before.
  void released(UnitId unit, EventId computed, LeaseGradient gradient);
  // Called when no more gradients come in this step. This call precedes the call that makes a
  // gradient final.
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
