// This class handles units whose home is the device, in the time between a unit's update and the
// unit's next use. If ranks share the optimizer's state but not the parameters, each rank updates
// its own shard of a unit. After the update, a gather in place brings the other ranks' shards to
// this rank. The updates may end in any order. The gathers are issued in forward order, so that the
// sequence is the same on every rank. A unit with sharded parameters is gathered for each use, and
// not after each update (engine/flow/prefetcher.h). For such a unit, this class records only the
// end of the shard's update.
//
// Thread rule: scheduler's thread only, except event() and updated_event(), which any thread may
// call.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/plan/placement.h"
#include "engine/ranks/ranks.h"
#include "engine/store/tiers.h"

namespace sluice {

class ResidentUnits {
 public:
  // All arguments must outlive the object. `on_change` runs when a gather has been queued. Units
  // that are not in the model's forward order are gathered last.
  ResidentUnits(const FlowParts& parts, std::function<void()> on_change);

  // Called when the work that changes `unit` has been enqueued on `stream`. This work writes new
  // parameters to those blocks of the unit that belong to this rank. After each update, the
  // function must be called once for each unit whose home is the device. The function must also be
  // called when a frozen unit gets its values. The calls for frozen units must come in the same
  // order on every rank.
  void updated(UnitId unit, StreamId stream);
  // If an update does not change the unit, this function is called instead of updated().
  void left(UnitId unit);

  // Whether the gather after the unit's last update has been queued on the device. A gather may
  // have to wait for the gathers of units that come earlier in forward order. For example,
  // announced units come last in forward order. But a step may use announced units before the other
  // units have been updated.
  bool is_queued(UnitId unit) const {
    const std::size_t i = index_of(unit);
    return unqueued_[i] == 0 && (!is_updated_[i] || is_left_[i]);
  }
  bool is_idle() const { return all_unqueued_ == 0; }
  // The event that is recorded after the unit's last update on this rank. If a gather follows this
  // update, the event is recorded after the gather.
  // Requires: is_queued().
  EventId event(UnitId unit) const { return ready_events_[index_of(unit)].id(); }
  // The event that is recorded after the unit's last update on this rank.
  EventId updated_event(UnitId unit) const {
    return is_gathered(unit) ? updated_events_[index_of(unit)].id() : event(unit);
  }
  std::uint64_t take_gathered_bytes();
  // The time when the unit's last gather began. Any thread may call this function.
  const BeginTime* gather_begun_ns(UnitId unit) const { return &gathers_begun_ns_[index_of(unit)]; }

 private:
  // Whether the unit is gathered after each update. A gather after an update is not needed if the
  // rank updates the complete unit, or if the unit is gathered for each use.
  bool is_gathered(UnitId unit) const {
    const UnitPlace& place = layout_.unit(unit);
    return ranks_.shard_optimizer() && !place.is_sharded && !place.is_local;
  }
  void gather_in_order();
  void gather(UnitId unit);

  const Layout& layout_;
  const Tiers& tiers_;
  Ranks& ranks_;
  Device& device_;
  Scheduler& scheduler_;
  std::function<void()> on_change_;
  std::vector<UnitId> order_;     // updated units whose home is the device, in forward order
  std::size_t next_ = 0;          // index in order_ of the next unit to gather
  std::vector<bool> is_updated_;  // by unit
  std::vector<bool> is_left_;     // by unit: the last update was left(), so nothing is gathered
  std::vector<Event> updated_events_;    // by unit
  std::vector<Event> ready_events_;      // by unit
  std::vector<std::uint32_t> unqueued_;  // by unit: gathers that have not been queued
  std::uint32_t all_unqueued_ = 0;
  std::uint64_t gathered_bytes_ = 0;
  std::uint64_t updates_ = 0;  // number of updates so far; frozen units get values before the first
  std::vector<BeginTime> gathers_begun_ns_;  // by unit
  Stream stream_;
};

}  // namespace sluice
