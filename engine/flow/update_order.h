// This class decides which block of an update starts next, and whether the block may be updated
// now. The policies of optimizer.overlap differ in these two decisions (docs/design/updates.md).
// These decisions depend on gradients, coefficients and the orders of blocks. The optimizer pass is
// responsible for lanes, transfers and arithmetic.
//
// `serial`: no block starts before apply().
// `deferred`: blocks start in forward order, so that they are read ahead. The updates wait for
// apply().
// `eager`: a block starts when its parameters have been fetched for the last backward use. The
// block is updated when its gradient is final. After apply(), the remaining blocks start in forward
// order.
// `speculative`: the rules of `eager` hold for blocks whose update can be tentative. The other
// blocks start in forward order after apply().
// With some settings of optimizer.untouched, units without a gradient stay unchanged. With these
// settings, no block starts before the first gradient of its unit has come. After apply(), the
// blocks of units without a gradient count as updated.
//
// Thread rule: scheduler's thread only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <sluice/config.h>
#include "engine/flow/block_update.h"
#include "engine/plan/placement.h"

namespace sluice {

struct Update {
  OverlapPolicy policy = OverlapPolicy::kSerial;  // not kAuto
  std::uint64_t version = 0;                      // the number of updates before this one
  UnitCoefficients coefficients;                  // assumed, until the real ones are known
};

// The place where a block is updated. Each place has its own order of blocks.
enum class UpdatePlace : std::uint8_t {
  kLane,     // in the buffers of a lane
  kInPlace,  // in host memory, if all of the block is at home there
  kDevice,   // on the device, if all of the block is at home there
};
inline constexpr std::size_t kUpdatePlaces = 3;

class UpdateOrder {
 public:
  enum class Phase : std::uint8_t {
    kIdle,
    kAhead,     // gradients or coefficients are still missing
    kApplying,  // coefficients are known, but some blocks are not updated yet
  };

  // All arguments must outlive the object. `forward_order` is the order in which the next step will
  // use the units. Units that `forward_order` omits come last.
  UpdateOrder(const Layout& layout, const Placement& placement,
              std::span<const UnitId> forward_order,
              UntouchedPolicy untouched = UntouchedPolicy::kUpdate);

  // Announces the next update. begin_announced() later makes this update the current update.
  // Requires: the current update is being applied, or has ended.
  void announce(const Update& update);
  bool may_begin() const { return phase_ == Phase::kIdle && next_.has_value(); }
  void begin_announced();
  void fetched(UnitId unit);
  // Called when the unit's first gradient of the present step has come.
  void touched(UnitId unit);
  void gradient_is_final(UnitId unit);
  // Whether the present update leaves the unit unchanged.
  bool stays(UnitId unit) const {
    return skips_untouched_ && !is_touched_[index_of(unit)] &&
           (!placement_.is_lazy || placement_.may_stay(layout_.unit(unit)));
  }
  // Whether an update is being applied, but has not reached the block yet.
  bool is_pending(BlockId block) const {
    return phase_ == Phase::kApplying && states_[index_of(block)] != State::kUpdated;
  }
  // Called when the coefficients are known. From then on, every block may be updated.
  void apply(const UnitCoefficients& coefficients);
  // Cancels an update that has been announced or has begun. The update must not have been passed to
  // apply(). Returns whether the update had begun.
  bool cancel();

  Phase phase() const { return phase_; }
  // Whether the announced update has begun.
  bool is_begun() const { return phase_ == Phase::kAhead && !next_; }
  const Update& current() const { return current_; }
  bool updates_are_tentative() const {
    return phase_ == Phase::kAhead && current_.policy == OverlapPolicy::kSpeculative;
  }

  // The block that starts next at `place`. take_next() marks this block as started.
  std::optional<BlockId> next(UpdatePlace place) const;
  void take_next(UpdatePlace place);
  bool may_update(BlockId block) const;
  // Returns the position of the block in forward order.
  std::uint32_t rank(BlockId block) const { return rank_[index_of(block)]; }

  // set_tentative() marks a block whose tentative update no longer needs a lane. set_waiting()
  // marks a block that has to be started again.
  void set_tentative(BlockId block) { states_[index_of(block)] = State::kTentative; }
  bool is_tentative(BlockId block) const { return states_[index_of(block)] == State::kTentative; }
  void set_waiting(BlockId block) { states_[index_of(block)] = State::kWaiting; }
  // Called when the block has been updated permanently. Returns whether all blocks of the unit have
  // been updated. The present update ends when all blocks of all units have been updated.
  bool count_updated(const BlockPlace& block);
  std::uint64_t updated_count() const { return updated_count_; }

 private:
  enum class State : std::uint8_t { kWaiting, kStarted, kTentative, kUpdated };
  struct Queue {
    std::vector<BlockId> blocks;
    std::size_t next = 0;
  };

  Queue& queue(UpdatePlace place) { return queues_[static_cast<std::size_t>(place)]; }
  const Queue& queue(UpdatePlace place) const { return queues_[static_cast<std::size_t>(place)]; }
  UpdatePlace place_of(BlockId block) const;
  bool updates_early() const;
  void append(UnitId unit);
  void append_early(UnitId unit);
  bool starts_when_touched() const;
  void forget_step();
  void queue_rest();
  void end_if_complete();

  const Layout& layout_;
  const Placement& placement_;
  const bool skips_untouched_;
  std::vector<BlockId> forward_blocks_;  // every trained block, in forward order
  std::vector<std::uint32_t> rank_;      // by block: its index in forward_blocks_

  Phase phase_ = Phase::kIdle;
  Update current_;
  std::optional<Update> next_;
  std::vector<State> states_;  // by block; frozen blocks always count as updated
  std::uint64_t updated_count_ = 0;
  std::vector<std::uint32_t> unit_blocks_left_;  // by unit: number of blocks not updated yet
  std::array<Queue, kUpdatePlaces> queues_;
  // The members below describe the step whose gradients are arriving.
  std::vector<UnitId> early_units_;   // units whose blocks may start early, in this order
  std::vector<bool> gradient_final_;  // by unit
  std::vector<bool> is_fetched_;      // by unit: the step's last fetch has ended
  std::vector<bool> is_touched_;      // by unit
};

}  // namespace sluice
