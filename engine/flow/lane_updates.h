// The updates of blocks in lanes of the optimizer pass. The worker makes these updates on the CPU,
// and updates several small blocks at a time. With optimizer.update_on "device", the device makes
// these updates (engine/flow/streamed_updates.h). The worker then makes only the late updates
// (engine/flow/late_updates.h).
//
// Thread rule: scheduler's thread only, except where stated.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/flow/optimizer_lane.h"
#include "engine/flow/streamed_updates.h"
#include "engine/run/worker.h"

namespace sluice {

class LaneUpdates {
 public:
  // All arguments must outlive the object. `math` may be null if the CPU makes all updates.
  // `on_updated` runs when a lane's update has ended or has failed. If a weight overflows in an
  // update with assumed coefficients, OptimizerLane::overflow is set.
  LaneUpdates(const FlowParts& parts, const ResidentUnits& residents, DeviceMath* math,
              std::function<void(OptimizerLane& lane)> on_updated);

  // Returns whether start() may be called for the lane.
  bool may_start(const OptimizerLane& lane) const;
  // Starts the update of the lane's block with the lane's coefficients. Small blocks wait until
  // there are enough small blocks, or until flush() is called.
  void start(OptimizerLane& lane);
  void flush();
  // The bytes that have been copied to the device and back since the last call.
  std::uint64_t take_copied_bytes() { return streamed_ ? streamed_->take_copied_bytes() : 0; }

 private:
  bool is_streamed(const OptimizerLane& lane) const { return streamed_ && !lane.is_late; }
  void stream(OptimizerLane& lane);
  void update(OptimizerLane& lane);
  void name_overflow(OptimizerLane& lane);
  void keep_assumed(OptimizerLane& lane, const std::function<void()>& work);

  const Layout& layout_;
  const Placement& placement_;
  Device& device_;
  Worker& worker_;
  std::function<void(OptimizerLane& lane)> on_updated_;
  std::uint32_t posted_ = 0;  // number of tasks posted to the worker
  std::vector<OptimizerLane*> together_;
  std::uint64_t elements_ = 0;  // of the blocks in `together_`

  // The pointer is null if the CPU makes all updates. This member comes last, because its callbacks
  // use all other members.
  std::unique_ptr<StreamedUpdates> streamed_;
};

}  // namespace sluice
