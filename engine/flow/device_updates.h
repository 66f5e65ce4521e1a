// The update of units whose optimizer state is at home on the device: enqueued there, in place,
// behind which the unit's next use waits on the device alone. Nobody waits here, so these updates
// need no lanes: what is enqueued is as good as done, unless a weight overflows; that is heard of
// when the unit's updates have run, and is then the scheduler's failure.
//
// Thread rule: scheduler's thread only.
// Invariant: the device holds the unit's final gradient before its update is enqueued.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/flow/block_update.h"
#include "engine/flow/resident_units.h"
#include "engine/run/worker.h"
#include "gpu/math/device_math.h"

namespace sluice {

class DeviceUpdates {
 public:
  // All must outlive it; `math` may be null where no unit is updated here. `on_end` runs when a
  // unit's updates of a step have ended.
  DeviceUpdates(const Layout& layout, const Tiers& tiers, const ResidentUnits& residents,
                DeviceMath* math, Device& device, Scheduler& scheduler, Worker& worker,
                std::function<void(UnitId unit, std::uint64_t step)> on_end);

  // Enqueues the update of a block, behind whatever last brought the unit's parameters.
  void update(const BlockPlace& block, const StepCoefficients& coefficients);
  // All of the unit's blocks have been given to update(); `step`, for messages, is the step's
  // number.
  void end_unit(UnitId unit, std::uint64_t step);

  StreamId stream() const { return stream_.id(); }
  // The unit's updates are under way, all of a step.
  bool is_running(UnitId unit) const { return is_running_[index_of(unit)]; }
  // No update is under way.
  bool is_idle() const { return units_left_ == 0; }
  // A weight has overflowed: the state is between two steps.
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
  std::vector<std::uint64_t> begun_ns_;  // by unit: its first block of the update was enqueued
  std::vector<bool> is_running_;         // by unit
  bool is_damaged_ = false;

  Stream stream_;  // last: its callbacks use all of the above
};

}  // namespace sluice
