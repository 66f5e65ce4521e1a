// The update of every block once per step: read the parts that are not in memory, Adam, write back,
// with several blocks in flight so that the three overlap. Where the device has all of a unit's
// state, the same arithmetic runs there (engine/flow/device_updates.h). A lane holds one block from
// the start of its reads to the end of its writes. engine/flow/update_order.h decides which block
// comes next, and when it may be updated. Speculative updates are written to shadow copies on
// storage; apply() adopts them, or has them repeated from the old state. With a durable store, a
// lane keeps its block until a copy is free that no commit names (engine/flow/commits.h).
//
// Thread rule: scheduler's thread only.
// Progress: a lane waits for its own reads, a parameter slot that copies under way will free, the
// step's gradients or coefficients, the worker, a commit, and its own writes. A commit waits for
// stores of earlier versions and for the drives, never for a lane that waits for it. Nothing in the
// step waits for a lane, except the next step's use of the block's unit. Blocks of one update are
// independent, so any order gives the same bits.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <sluice/error.h>
#include "engine/flow/commits.h"
#include "engine/flow/device_updates.h"
#include "engine/flow/parameter_slots.h"
#include "engine/flow/resident_units.h"
#include "engine/flow/update_order.h"
#include "engine/flow/waiting_gradients.h"
#include "engine/run/step_timeline.h"
#include "engine/run/worker.h"

namespace sluice {

class OptimizerPass {
 public:
  // All must outlive the pass; `math` may be null where no unit is updated on the device, and
  // `commits` where the state is scratch.
  // `forward_order`: the order in which the next step will need units.
  // `on_change` runs when something here has moved.
  OptimizerPass(const Layout& layout, const Placement& placement, const Tiers& tiers,
                ParameterSlots& slots, BlockStore& store, Device& device, Scheduler& scheduler,
                Worker& worker, ResidentUnits& residents, WaitingGradients& waiting,
                DeviceMath* math, Commits* commits, std::span<const UnitId> forward_order,
                std::function<void()> on_change);

  // Announces the step's update, with the coefficients that eager and speculative updates assume.
  // It begins when the one before has been applied.
  // Requires: the update announced before has been passed to apply(), or cancelled.
  void announce(const Update& update);
  // The unit's parameters have been fetched for its last use of the step.
  void fetched(UnitId unit);
  // The unit's gradient of the step is complete and in the set.
  void gradient_is_final(UnitId unit);
  // Every gradient is final, and these are the coefficients. `as_assumed`: they are the announced
  // ones.
  // Requires: is_begun().
  void apply(const StepCoefficients& coefficients, bool as_assumed);
  // There will be no apply() for the announced update. Lanes drop the blocks that they read ahead.
  void cancel();
  // Starts nothing more, permanently.
  void stop();

  // Advances everything that can move.
  void pump();

  // Whether every block of the last update passed to apply() is updated; writes may still be under
  // way.
  bool is_applied() const { return order_.phase() != UpdateOrder::Phase::kApplying; }
  // Whether the announced update is under way: apply() may be called.
  bool is_begun() const { return order_.is_begun(); }
  // Whether some blocks have been updated permanently and others have not, or a failure has kept
  // one from its home: the state is between two steps.
  bool is_partial() const;
  // The version that the last update started from.
  std::uint64_t version() const { return order_.current().version; }
  // Whether all updates passed to apply() have been applied, and every write has ended. Lanes may
  // hold blocks that they have read ahead.
  bool is_home() const;
  // The same for the updates that make `version` and earlier ones.
  bool has_stored(std::uint64_t version) const;
  // The cause that delays the update of `block`; without a block, the end of the pass.
  WaitCause waits_for(std::optional<BlockId> block = {}) const;
  // Whether no lane holds anything.
  bool idle() const { return lanes_busy_ == 0 && device_updates_.is_idle(); }
  // Whether gradients from outside host memory are on their way to a lane.
  bool is_reading_gradients() const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffffu;

  enum class LanePhase : std::uint8_t { kFree, kReading, kLoaded, kUpdating, kUpdated, kWriting };

  struct Lane {
    Transfer record_transfer;
    Transfer gradient_transfer;
    BlockId block{};
    std::uint32_t slot = kNone;       // for its parameters, unless they are homed in host memory
    std::byte* parameters = nullptr;  // for Adam
    std::byte* record = nullptr;
    const std::byte* gradients = nullptr;
    std::uint64_t version = 0;      // the update starts from it
    std::uint64_t sequence = 0;     // its number among starts
    std::uint64_t begin_ns = 0;     // when this one began
    StepCoefficients coefficients;  // for the worker
    std::uint32_t pending = 0;      // transfers and device copies before the next phase
    LanePhase phase = LanePhase::kFree;
    bool wants_gradients = false;  // gradients outside host memory, not requested yet
    bool is_reading_gradients = false;
    bool is_tentative = false;  // written to the shadow, until apply() decides
    bool must_adopt = false;    // apply() has decided: the shadow becomes home
    bool is_void = false;       // of a cancelled update: only waits for work under way
    bool must_redo = false;     // the coefficients assumed for it were wrong
    bool is_assuming = false;   // its update with assumed coefficients is running
    // Weights have overflowed with these: an error only if they turn out to be right.
    std::optional<Error> overflow;
  };

  void settle_tentative(bool adopt);
  void drop_shadows(BlockId block);
  bool is_next(const Lane& lane, const Lane& than) const;
  void advance_lanes();
  void advance(std::uint32_t lane);
  bool is_read(const Lane& lane) const;
  bool is_written(const Lane& lane) const;
  void finish_writing(std::uint32_t lane);
  void start_lanes(UpdatePlace place);
  void start_on_device();
  bool start(std::uint32_t lane, BlockId block);
  void load(std::uint32_t lane);
  void load_gradients(std::uint32_t lane);
  void post_updates();
  std::uint32_t next_to_update() const;
  void update(std::uint32_t lane);
  void updated(std::uint32_t lane);
  void take_effect(std::uint32_t lane);
  bool may_write(const Lane& lane) const;
  void advance_updated(std::uint32_t lane);
  void write(std::uint32_t lane);
  bool is_being_committed(BlockId block) const {
    return commits_ != nullptr && commits_->saver().is_saving(block);
  }
  void device_updates_ended(UnitId unit, std::uint64_t step);
  bool count_updated(const BlockPlace& block, StreamId stream);
  void release(std::uint32_t lane, bool keep_parameters);
  void add_pending_copy(std::uint32_t lane, StreamId stream);
  void gradients_loaded(std::uint32_t lane);
  std::uint64_t lane_bytes() const {
    return placement_.lanes.slot_bytes + placement_.lane_gradients.slot_bytes;
  }

  const Layout& layout_;
  const Placement& placement_;
  const Tiers& tiers_;
  ParameterSlots& slots_;
  BlockStore& store_;
  Device& device_;
  Scheduler& scheduler_;
  Worker& worker_;
  ResidentUnits& residents_;
  WaitingGradients& waiting_;
  Commits* const commits_;
  std::function<void()> on_change_;
  UpdateOrder order_;
  DeviceUpdates device_updates_;

  std::vector<Lane> lanes_;       // those with buffers, then those for blocks updated in place
  std::uint32_t buffered_lanes_;  // how many of them have buffers
  std::uint32_t lanes_busy_ = 0;
  std::uint32_t updates_posted_ = 0;  // to the worker
  std::uint64_t starts_ = 0;
  std::vector<bool> in_lane_;  // by block; also during the write of the update before

  bool is_stopped_ = false;
  bool is_damaged_ = false;  // a failure has struck a block between two versions

  Stream down_stream_;  // last: their callbacks use everything above
  Stream up_stream_;
};

}  // namespace sluice
