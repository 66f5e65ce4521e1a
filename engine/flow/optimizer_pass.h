// The optimizer pass updates every block once per step. The pass reads those parts of a block that
// are not in memory. Then the pass runs Adam, and writes the results back. Several blocks are
// processed at the same time, so that reads, computation and writes overlap. If the home of a
// unit's state is the device, the device updates the unit with the same arithmetic
// (engine/flow/device_updates.h). A lane holds one block, from the start of the block's reads to
// the end of the block's writes. UpdateOrder decides which block starts next, and when a block may
// be updated (engine/flow/update_order.h). Speculative updates are written to shadow copies on
// storage. If the assumed coefficients were right, apply() adopts the shadow copies. Otherwise the
// updates are repeated from the old state. With a durable store, a lane keeps its block until the
// block can be written to a copy that no commit names (engine/flow/commits.h).
// A block that makes up for missed updates needs a lane, too (engine/flow/late_updates.h).
//
// Thread rule: scheduler's thread only.
// Progress: a lane waits for its own reads and writes, for the worker, for a commit, and for the
// step's gradients or coefficients. A lane also waits for a parameter slot, which becomes free when
// the copies under way have ended. A commit waits for the drives and for the writes of earlier
// versions. A commit never waits for a lane that waits for this commit. Two kinds of uses may wait
// for a lane. The first kind is a use that comes in the next step and needs the block in the lane.
// The second kind is a use of a unit that has missed updates. Nothing else in a step waits for a
// lane. As long as lanes may wait for computation, one lane is kept free for units that have missed
// updates. The blocks of one update are independent. So any order of the updates gives the same
// bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "engine/flow/commits.h"
#include "engine/flow/device_updates.h"
#include "engine/flow/flow_parts.h"
#include "engine/flow/home_leases.h"
#include "engine/flow/lane_transfers.h"
#include "engine/flow/lane_updates.h"
#include "engine/flow/late_updates.h"
#include "engine/flow/optimizer_lane.h"
#include "engine/flow/parameter_slots.h"
#include "engine/flow/resident_units.h"
#include "engine/flow/state_saver.h"
#include "engine/flow/update_order.h"
#include "engine/flow/waiting_gradients.h"
#include "engine/run/step_timeline.h"
#include "engine/run/worker.h"

namespace sluice {

// The pass uses these other parts of a step.
struct UpdateParts {
  ParameterSlots& slots;
  ResidentUnits& residents;
  HomeLeases& leases;
  WaitingGradients& waiting;
  DeviceMath* math;  // null if no block is updated on the device
  Commits* commits;  // null if the state is scratch
  StateSaver& saver;
};

class OptimizerPass {
 public:
  // All arguments except the struct `own` itself must outlive the pass. `on_change` runs whenever
  // the pass has made progress.
  OptimizerPass(const FlowParts& parts, const UpdateParts& own, std::function<void()> on_change);

  // Announces the step's update. Eager and speculative updates use `update.coefficients` until
  // apply() gives the real coefficients. The update begins when the previous update has been
  // applied. Requires: apply() or cancel() has been called for the previous update.
  void announce(const Update& update);
  // Called when the unit's parameters have been fetched for the unit's last use in the step.
  void fetched(UnitId unit);
  // Called when the unit's first gradient of the step is being moved to its home.
  void touched(UnitId unit) { order_.touched(unit); }
  // Called when the unit's gradient of the step is complete and has reached its home.
  void gradient_is_final(UnitId unit);
  // Called when every gradient is final and the coefficients are known. `as_assumed` says whether
  // `coefficients` equal the announced coefficients. Returns the number of units that the update
  // does not change now. The version of a unit grows by one if the update changes the unit, now or
  // later (optimizer.untouched "lazy").
  // Requires: is_begun().
  std::uint32_t apply(const UnitCoefficients& coefficients, bool as_assumed);
  // Starts the missed updates of the unit's blocks (optimizer.untouched "lazy"). These updates
  // bring the blocks to the unit's version. If the blocks have missed no update, the call does
  // nothing.
  void catch_up(const UnitPlace& unit);
  // Calls catch_up() for all units.
  void catch_up();
  // The bytes that late updates have read from storage since the last call. During this time, the
  // late updates have written the same number of bytes.
  std::uint64_t take_late_bytes() { return std::exchange(late_bytes_, 0); }
  // Cancels the announced update. apply() must not be called for this update. The lanes drop the
  // blocks that they have read ahead.
  void cancel();
  // After this call, the pass starts no more work.
  void stop();

  // Starts all work that can start now.
  void pump();

  // Returns whether the last update that was passed to apply() has updated every block. The writes
  // may still be under way.
  bool is_applied() const { return order_.phase() != UpdateOrder::Phase::kApplying; }
  // Returns whether the announced update is under way. If the result is true, apply() may be
  // called.
  bool is_begun() const { return order_.is_begun(); }
  // Returns whether the state belongs to no step. The result is true if some blocks have been
  // updated permanently and others have not. The result is also true if a block has not reached its
  // home because of a failure.
  bool is_partial() const;
  // The version of the state before the last update.
  std::uint64_t version() const { return order_.current().version; }
  // Returns whether all updates that were passed to apply() have been applied, and all writes of
  // these updates have ended. Lanes may still hold blocks that have been read ahead.
  bool is_home() const;
  // Returns whether all updates up to version `version` have been applied, and all writes of these
  // updates have ended.
  bool has_stored(std::uint64_t version) const;
  // The reason why the update of `block` has not ended. If no block is given, the result is the
  // reason why the pass has not ended.
  WaitCause waits_for(std::optional<BlockId> block = {}) const;
  // Returns whether no lane holds a block and no update runs on the device.
  bool idle() const { return lanes_busy_ == 0 && device_updates_.is_idle(); }
  // Returns whether a lane holds the block or the device is updating the block's unit.
  bool holds(BlockId block) const {
    return in_lane_[index_of(block)] || device_updates_.is_running(layout_.block(block).unit);
  }
  // Returns all blocks, in the order in which the pass updates the blocks after the norm is known.
  // Frozen blocks come last.
  std::vector<BlockId> blocks_in_order() const;
  // The bytes that have been copied between device and lanes since the last call.
  std::uint64_t take_copied_bytes() {
    return transfers_.take_copied_bytes() + updates_.take_copied_bytes();
  }
  // Returns whether a lane is reading gradients that have waited outside host memory.
  bool is_reading_gradients() const;

 private:
  using Lane = OptimizerLane;
  using Phase = Lane::Phase;
  using Outcome = Lane::Outcome;

  void settle(Lane& lane, bool adopt);
  void count_versions(const std::vector<bool>& stays);
  void commit(BlockId block, std::uint64_t step);
  void leave_held(BlockId block, std::uint64_t first_step);
  bool is_next(const Lane& lane, const Lane& than) const;
  void advance(Lane& lane);
  void finish_reading(Lane& lane);
  void finish_writing(Lane& lane);
  void start_lanes(UpdatePlace place);
  void start_late();
  void start_on_device();
  bool start(Lane& lane, BlockId block, const LateUpdates::Entry* late = nullptr);
  void load(Lane& lane);
  void post_updates();
  Lane* next_to_update();
  void updated(Lane& lane);
  void take_effect(Lane& lane);
  void advance_updated(Lane& lane);
  void write(Lane& lane);
  bool is_over() const { return is_stopped_ || scheduler_.failed(); }
  bool is_being_committed(BlockId block) const {
    return commits_ != nullptr && commits_->saver().is_saving(block);
  }
  bool is_being_saved(BlockId block, std::uint64_t updates) const;
  void device_updates_ended(UnitId unit, std::uint64_t step);
  bool count_updated(const BlockPlace& block, StreamId stream);
  void release(Lane& lane, bool keep_parameters);

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  ParameterSlots& slots_;
  BlockStore& store_;
  Scheduler& scheduler_;
  Worker& worker_;
  ResidentUnits& residents_;
  const HomeLeases& leases_;
  WaitingGradients& waiting_;
  Commits* const commits_;
  StateSaver& saver_;
  UnitVersions& versions_;
  std::function<void()> on_change_;
  UpdateOrder order_;
  LateUpdates late_;
  std::uint64_t late_bytes_ = 0;
  DeviceUpdates device_updates_;

  std::vector<Lane> lanes_;       // lanes with buffers come before lanes for updates in place
  std::uint32_t buffered_lanes_;  // number of lanes with buffers
  const std::uint64_t lane_bytes_;
  std::uint32_t lanes_busy_ = 0;
  std::uint64_t starts_ = 0;
  std::vector<bool> in_lane_;  // by block; still true while the previous update is being written
  // left_until_ has one entry for each block. While a lane or the device holds a block, steps may
  // leave the block unchanged. Then an earlier update is being written to the block's home, or the
  // lane still reads for a cancelled step. The entry is the number of the last step that has left
  // the block unchanged. The entry is 0 if no step has left the block unchanged. When the block is
  // no longer held, leave_held() reports these steps to the commits.
  std::vector<std::uint64_t> left_until_;

  bool is_stopped_ = false;
  bool is_damaged_ = false;  // a failure has left a block between two versions

  LaneUpdates updates_;
  LaneTransfers transfers_;  // last member, because its callbacks use all others
};

}  // namespace sluice
