// Units homed on the device, between their update and their next use. If ranks share the
// optimizer's state but not the parameters, each rank has updated its own shard of a unit. A gather
// in place then brings the other shards. Updates may end in any order, but gathers are issued in
// forward order, so that every rank issues the same sequence. A unit with sharded parameters is
// gathered for each use instead (engine/flow/prefetcher.h). For such a unit, this class only knows
// when the shard has been updated.
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
  // All arguments must outlive the object. Units that the model's forward order omits come last.
  // `on_change` runs when a gather has been queued.
  ResidentUnits(const FlowParts& parts, std::function<void()> on_change);

  // Called when the work that is now on `stream` gives new parameters to the rank's blocks of
  // `unit`. Called once per update for each unit homed on the device. Also called for a frozen unit
  // when the unit gets its values, in the same order on every rank.
  void updated(UnitId unit, StreamId stream);
  // Does the same for an update that does not change the unit.
  void left(UnitId unit);

  // Whether the gather that the unit's last update caused has been queued on the device. A gather
  // that still waits for its turn has not been queued: units that come last in that order, such as
  // announced ones, are used before others in it have been updated.
  bool is_queued(UnitId unit) const {
    const std::size_t i = index_of(unit);
    return unqueued_[i] == 0 && (!is_updated_[i] || is_left_[i]);
  }
  bool is_idle() const { return all_unqueued_ == 0; }
  // The event recorded after all work that the unit's last update caused on this rank.
  // Requires: is_queued().
  EventId event(UnitId unit) const { return ready_events_[index_of(unit)].id(); }
  // The event recorded after the unit's last update on this rank.
  EventId updated_event(UnitId unit) const {
    return is_gathered(unit) ? updated_events_[index_of(unit)].id() : event(unit);
  }
  std::uint64_t take_gathered_bytes();
  // The time when the unit's last gather began. Any thread.
  const BeginTime* gather_begun_ns(UnitId unit) const { return &gathers_begun_ns_[index_of(unit)]; }

 private:
  // Whether the unit is gathered after each update. Otherwise the unit is whole on this rank, or
  // gathered for each use.
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
  std::vector<UnitId> order_;            // of updated units homed on the device
  std::size_t next_ = 0;                 // in order_: the next one to gather
  std::vector<bool> is_updated_;         // by unit
  std::vector<bool> is_left_;            // by unit: among those, it has nothing to gather
  std::vector<Event> updated_events_;    // by unit
  std::vector<Event> ready_events_;      // by unit
  std::vector<std::uint32_t> unqueued_;  // by unit: gathers that have not been queued
  std::uint32_t all_unqueued_ = 0;
  std::uint64_t gathered_bytes_ = 0;
  std::uint64_t updates_ = 0;                // of all units; before the first they get their values
  std::vector<BeginTime> gathers_begun_ns_;  // by unit
  Stream stream_;
};

}  // namespace sluice
