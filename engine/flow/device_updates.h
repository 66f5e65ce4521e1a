// The update of units whose optimizer state is at home on the device. The update is enqueued on the
// device and changes the state in place. Only the unit's next work on the device waits for the
// update. Nothing on the host waits, so these updates need no lanes. An enqueued update counts as
// done, unless a weight overflows. An overflow is reported when the unit's updates have run, and
// then becomes the scheduler's failure.
//
// Thread rule: scheduler's thread only.
// Invariant: the device holds the unit's final gradient before its update is enqueued.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/flow/block_update.h"
#include "engine/flow/flow_parts.h"
#include "engine/flow/resident_units.h"
#include "engine/run/worker.h"
#include "gpu/math/device_math.h"

namespace sluice {

class DeviceUpdates {
 public:
  // All arguments must outlive the object. `math` may be null if no unit is updated on the device.
  // `on_end` runs when a unit's updates of a step have ended.
  DeviceUpdates(const FlowParts& parts, const ResidentUnits& residents, DeviceMath* math,
                std::function<void(UnitId unit, std::uint64_t step)> on_end);

  // Enqueues the update of a block, behind the work that last brought the unit's parameters.
  void update(const BlockPlace& block, const StepCoefficients& coefficients);
  // Called when all of the unit's blocks have been passed to update(). `step` is the step's number
  // for messages.
  void end_unit(UnitId unit, std::uint64_t step);

  StreamId stream() const { return stream_.id(); }
  // Whether the unit's updates of a step are all under way.
  bool is_running(UnitId unit) const { return is_running_[index_of(unit)]; }
  // Whether no update is under way.
  bool is_idle() const { return units_left_ == 0; }
  // Whether a weight has overflowed. The state is then that of no step.
  bool is_damaged() const { return is_damaged_; }

 private:
  void ended(UnitId unit, std::uint64_t step);
  [[noreturn]] void name_overflow(UnitId unit, std::uint64_t step) const;

  const Layout& layout_;
  const Tiers& tiers_;
  const ResidentUnits& residents_;
  DeviceMath* math_;
  Device& device_;
  Scheduler& scheduler_;
  Worker& worker_;
  std::function<void(UnitId unit, std::uint64_t step)> on_end_;

  std::uint32_t units_left_ = 0;
  std::vector<std::uint64_t> begun_ns_;  // by unit: when its first block of the update was enqueued
  std::vector<bool> is_running_;         // by unit
  bool is_damaged_ = false;

  Stream stream_;  // last: its callbacks use everything above
};

}  // namespace sluice
