// The update of units whose optimizer state has its home on the device. The update is enqueued on
// the device and changes the state in place. Only later work on the same unit waits for the update.
// The host does not wait, so these updates need no lanes. An update counts as done when it has been
// enqueued. If a weight overflows, the scheduler fails after all blocks of the unit have been
// updated.
//
// Thread rule: scheduler's thread only.
// Invariant: the unit's final gradient is on the device before the unit's update is enqueued.
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
  // `on_end` runs when the updates of all blocks of a unit have ended.
  DeviceUpdates(const FlowParts& parts, const ResidentUnits& residents, DeviceMath* math,
                std::function<void(UnitId unit, std::uint64_t step)> on_end);

  // Enqueues the update of a block. The update runs after the work that last wrote the unit's
  // parameters.
  void update(const BlockPlace& block, const StepCoefficients& coefficients);
  // Called when all of the unit's blocks have been passed to update(). `step` is the step's number,
  // for messages.
  void end_unit(UnitId unit, std::uint64_t step);

  StreamId stream() const { return stream_.id(); }
  // Whether the updates of all blocks of the unit have been enqueued, but have not ended yet.
  bool is_running(UnitId unit) const { return is_running_[index_of(unit)]; }
  // Whether no update is under way.
  bool is_idle() const { return units_left_ == 0; }
  // Whether a weight has overflowed. After an overflow, the state is not the state of any step.
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
  std::vector<std::uint64_t> begun_ns_;  // by unit: when the unit's first block was enqueued
  std::vector<bool> is_running_;         // by unit
  bool is_damaged_ = false;

  Stream stream_;  // last member, because its callbacks use all others
};

}  // namespace sluice
