// This class decides which block of an update comes next, and whether the block may be updated yet.
// The policies of optimizer.overlap differ in these decisions (docs/design/updates.md). This class
// knows gradients, coefficients and orders. Lanes, transfers and arithmetic belong to the optimizer
// pass.
//
// `serial`: nothing starts before apply().
// `deferred`: blocks start in forward order, so that they are read ahead. Their updates wait for
// apply(). `eager`: blocks start when their parameters have been fetched for backward, and are
// updated when their gradient is final. From apply() on, blocks start in forward order.
// `speculative`: the rules of `eager` hold if the update can be tentative. The other blocks start
// as under `deferred`, from apply() on.
// If units without a gradient stay as they are (optimizer.untouched), no block starts before its
// unit's first gradient. From apply() on, the blocks of units without a gradient count as updated.
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
  std::uint64_t version = 0;                      // the updates before it
  UnitCoefficients coefficients;                  // assumed, until they are known
};

// Where a block's update takes place. Each place takes its blocks in its own order.
enum class UpdatePlace : std::uint8_t {
  kLane,     // in a lane's buffers, with transfers to and from them
  kInPlace,  // in host memory, where all of it is at home
  kDevice,   // the same on the device
};
inline constexpr std::size_t kUpdatePlaces = 3;

class UpdateOrder {
 public:
  enum class Phase : std::uint8_t {
    kIdle,
    kAhead,     // gradients or coefficients are still missing
    kApplying,  // coefficients known, blocks left
  };

  // All arguments must outlive the object. `forward_order` is the order in which the next step will
  // need units. Units that `forward_order` omits come last.
  UpdateOrder(const Layout& layout, const Placement& placement,
              std::span<const UnitId> forward_order,
              UntouchedPolicy untouched = UntouchedPolicy::kUpdate);

  // Announces `update` as the successor of the current update. The call begin_announced() makes
  // this update the current one. Requires: the previous update is being applied, or has ended.
  void announce(const Update& update);
  bool may_begin() const { return phase_ == Phase::kIdle && next_.has_value(); }
  void begin_announced();
  void fetched(UnitId unit);
  // Called when the unit has a gradient in the step whose gradients are arriving.
  void touched(UnitId unit);
  void gradient_is_final(UnitId unit);
  // Whether apply() leaves the unit as it is.
  bool stays(UnitId unit) const {
    return skips_untouched_ && !is_touched_[index_of(unit)] &&
           (!placement_.is_lazy || placement_.may_stay(layout_.unit(unit)));
  }
  // Whether the update that is being applied has not updated the block yet.
  bool is_pending(BlockId block) const {
    return phase_ == Phase::kApplying && states_[index_of(block)] != State::kUpdated;
  }
  // Called when the coefficients are known, so that every block may be updated.
  void apply(const UnitCoefficients& coefficients);
  // Forgets an update that was announced, or that has begun without apply(). Returns whether the
  // update had begun.
  bool cancel();

  Phase phase() const { return phase_; }
  // Whether the announced update has begun.
  bool is_begun() const { return phase_ == Phase::kAhead && !next_; }
  const Update& current() const { return current_; }
  bool updates_are_tentative() const {
    return phase_ == Phase::kAhead && current_.policy == OverlapPolicy::kSpeculative;
  }

  // The block at `place` that starts next. The call take_next() starts this block.
  std::optional<BlockId> next(UpdatePlace place) const;
  void take_next(UpdatePlace place);
  bool may_update(BlockId block) const;
  // The block's place in forward order.
  std::uint32_t rank(BlockId block) const { return rank_[index_of(block)]; }

  // The call marks a block that has a tentative update and no lane, or that has to wait for another
  // start.
  void set_tentative(BlockId block) { states_[index_of(block)] = State::kTentative; }
  bool is_tentative(BlockId block) const { return states_[index_of(block)] == State::kTentative; }
  void set_waiting(BlockId block) { states_[index_of(block)] = State::kWaiting; }
  // Called when the block has been updated permanently. Returns whether the block is the last of
  // its unit. The last block of all units ends an update that is being applied.
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
  std::vector<std::uint32_t> rank_;      // by block: its place there

  Phase phase_ = Phase::kIdle;
  Update current_;
  std::optional<Update> next_;
  std::vector<State> states_;  // by block; frozen ones always count as updated
  std::uint64_t updated_count_ = 0;
  std::vector<std::uint32_t> unit_blocks_left_;  // by unit: blocks yet to be updated
  std::array<Queue, kUpdatePlaces> queues_;
  // These units belong to the step whose gradients are arriving.
  std::vector<UnitId> early_units_;   // in the order in which their blocks may start
  std::vector<bool> gradient_final_;  // by unit
  std::vector<bool> is_fetched_;      // by unit: for the last time in the step
  std::vector<bool> is_touched_;      // by unit
};

}  // namespace sluice
