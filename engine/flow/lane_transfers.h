// The transfers and copies of the optimizer pass. These transfers bring the planes of a block into
// the block's lane, and later back to the planes' homes. Speculative updates are written to shadow
// copies on storage.
//
// Thread rule: scheduler's thread only.
#pragma once

#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/flow/commits.h"
#include "engine/flow/flow_parts.h"
#include "engine/flow/optimizer_lane.h"
#include "engine/flow/parameter_slots.h"
#include "gpu/device/copy_runs.h"

namespace sluice {

class LaneTransfers {
 public:
  // All arguments must outlive the object. `commits` is null if the state is scratch. `on_change`
  // runs when a transfer or a copy of a lane has ended.
  LaneTransfers(const FlowParts& parts, ParameterSlots& slots, const Commits* commits,
                std::function<void()> on_change);

  // Prepares a lane. The lane must outlive the object, and must not move in memory.
  void attach(OptimizerLane& lane);

  // Starts the copies that load(), load_gradients() and copy_to_device() have added. Until flush()
  // is called, these copies wait, so that copies of adjacent blocks can be merged. The caller must
  // call flush() before it enqueues other work on up_stream().
  void flush();

  // Starts to read the block's record and parameters into the lane. Returns whether the lane
  // already has the parameters.
  bool load(OptimizerLane& lane);
  // If the block's gradients wait outside host memory, the call starts to read these gradients into
  // the lane. Requires: no more gradients will be added.
  void load_gradients(OptimizerLane& lane);
  // Whether all reads and copies into the lane have ended.
  bool is_read(const OptimizerLane& lane) const;

  // Starts to copy updated parameters to their home on the device.
  void copy_to_device(OptimizerLane& lane);
  // Whether the block may be written to storage. The result is true when the tables of all earlier
  // commits have been made, and the block has a free copy.
  bool may_write(const OptimizerLane& lane) const;
  // Starts to write the block's planes that have their home on storage. Requires: may_write().
  void write(OptimizerLane& lane);
  bool is_written(const OptimizerLane& lane) const;

  // adopt() turns the shadow copies of a block into the new homes of the block's planes.
  // drop_shadows() discards the shadow copies.
  void adopt(BlockId block);
  void drop_shadows(BlockId block);

  // The bytes that have been copied from and to the device since the last call.
  std::uint64_t take_copied_bytes() { return std::exchange(copied_bytes_, 0); }
  // The stream of the copies to the device.
  StreamId up_stream() const { return up_.stream.id(); }

 private:
  // A copy between a lane and the device.
  struct LaneCopy {
    OptimizerLane* lane = nullptr;
    bool is_gradient = false;
  };
  // The copies in one direction.
  struct Way {
    Way(Device& device, std::string_view name)
        : stream(device, name, StreamPriority::kHigh), runs(device, stream.id()) {}

    Stream stream;
    CopyRuns runs;
    std::vector<LaneCopy> copies;  // the copies in `runs`
  };

  void add(Way& way, CopyPiece piece, LaneCopy copy);
  void flush(Way& way);
  void ended(const std::vector<LaneCopy>& copies);
  void gradients_loaded(OptimizerLane& lane);

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  ParameterSlots& slots_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  const Commits* const commits_;
  std::function<void()> on_change_;
  std::uint64_t copied_bytes_ = 0;

  Way down_;  // last members, because their callbacks use all others
  Way up_;
};

}  // namespace sluice
