#include "engine/flow/update_order.h"

#include <utility>

#include <sluice/error.h>

namespace sluice {

UpdateOrder::UpdateOrder(const Layout& layout, const Placement& placement,
                         std::span<const UnitId> forward_order, UntouchedPolicy untouched)
    : layout_(layout),
      placement_(placement),
      skips_untouched_(untouched != UntouchedPolicy::kUpdate),
      rank_(layout.blocks().size()),
      states_(layout.blocks().size(), State::kUpdated),
      unit_blocks_left_(layout.units().size(), 0),
      gradient_final_(layout.units().size(), false),
      is_fetched_(layout.units().size(), false),
      is_touched_(layout.units().size(), false) {
  std::vector<bool> is_ordered(layout.units().size(), false);
  const auto add = [&](UnitId unit) {
    if (is_ordered[index_of(unit)] || layout.unit(unit).is_frozen) return;
    is_ordered[index_of(unit)] = true;
    for (const BlockPlace& block : layout.blocks_of(unit)) {
      rank_[index_of(block.id)] = static_cast<std::uint32_t>(forward_blocks_.size());
      forward_blocks_.push_back(block.id);
    }
  };
  for (const UnitId unit : forward_order) add(unit);
  for (const UnitPlace& unit : layout.units()) add(unit.id);
}

void UpdateOrder::announce(const Update& update) {
  SLUICE_CHECK(phase_ != Phase::kAhead && !next_,
               "an update is announced when the one before has been applied or cancelled");
  next_ = update;
  gradient_final_.assign(gradient_final_.size(), false);
}

void UpdateOrder::begin_announced() {
  SLUICE_CHECK(may_begin(), "an update begins when the one before has ended");
  current_ = *std::exchange(next_, std::nullopt);
  phase_ = Phase::kAhead;
  for (const BlockId block : forward_blocks_) states_[index_of(block)] = State::kWaiting;
  updated_count_ = 0;
  for (const UnitPlace& unit : layout_.units())
    unit_blocks_left_[index_of(unit.id)] = unit.block_count;
  queues_ = {};
  if (current_.policy == OverlapPolicy::kDeferred && !skips_untouched_) queue_rest();
  for (const UnitId unit : early_units_) append(unit);
}

// If computation wanted to leave the schedule and could not, a unit is fetched for its last use
// again.
void UpdateOrder::fetched(UnitId unit) {
  if (is_fetched_[index_of(unit)]) return;
  is_fetched_[index_of(unit)] = true;
  if (!skips_untouched_ || (is_touched_[index_of(unit)] && !starts_when_touched()))
    append_early(unit);
}

// Nothing says which fetch of an announced unit is its last.
void UpdateOrder::touched(UnitId unit) {
  if (is_touched_[index_of(unit)]) return;
  is_touched_[index_of(unit)] = true;
  if (skips_untouched_ && (is_fetched_[index_of(unit)] || starts_when_touched()))
    append_early(unit);
}

// Whether units that may stay start with their first gradient, without their last fetch.
bool UpdateOrder::starts_when_touched() const {
  return (next_ ? next_->policy : current_.policy) == OverlapPolicy::kDeferred;
}

void UpdateOrder::append_early(UnitId unit) {
  early_units_.push_back(unit);
  if (is_begun()) append(unit);
}

void UpdateOrder::gradient_is_final(UnitId unit) {
  gradient_final_[index_of(unit)] = true;
}

void UpdateOrder::apply(const UnitCoefficients& coefficients) {
  SLUICE_CHECK(is_begun(), "what is applied has begun");
  current_.coefficients = coefficients;
  phase_ = Phase::kApplying;
  for (const BlockId block : forward_blocks_) {
    if (!stays(layout_.block(block).unit)) continue;
    states_[index_of(block)] = State::kUpdated;
    ++updated_count_;
  }
  forget_step();
  queue_rest();
  end_if_complete();
}

// The step's update has begun with its units. Those of the next step that need no fetch come before
// the next update is announced.
void UpdateOrder::forget_step() {
  early_units_.clear();
  is_fetched_.assign(is_fetched_.size(), false);
  is_touched_.assign(is_touched_.size(), false);
}

bool UpdateOrder::cancel() {
  forget_step();
  if (std::exchange(next_, std::nullopt).has_value() || phase_ != Phase::kAhead) return false;
  phase_ = Phase::kIdle;
  return true;
}

bool UpdateOrder::updates_early() const {
  return current_.policy == OverlapPolicy::kEager || current_.policy == OverlapPolicy::kSpeculative;
}

UpdatePlace UpdateOrder::place_of(BlockId block) const {
  const Tier record = placement_.record_tier[index_of(block)];
  if (record == Tier::kDevice) return UpdatePlace::kDevice;
  const bool is_at_home = record == Tier::kHost && !placement_.update_takes_slot(block) &&
                          !placement_.lane_fetches_gradients(layout_.block(block).unit);
  return is_at_home ? UpdatePlace::kInPlace : UpdatePlace::kLane;
}

bool UpdateOrder::may_update(BlockId block) const {
  if (phase_ != Phase::kAhead) return phase_ == Phase::kApplying;
  return updates_early() && gradient_final_[index_of(layout_.block(block).unit)];
}

// Early updates come in the order in which backward finishes with units.
void UpdateOrder::append(UnitId unit) {
  if (!updates_early() && (!skips_untouched_ || current_.policy != OverlapPolicy::kDeferred))
    return;
  // A gradient that would have to be read twice if the update were repeated waits for the
  // coefficients.
  if (current_.policy == OverlapPolicy::kSpeculative && placement_.gradient_leaves(unit)) return;
  for (const BlockPlace& block : layout_.blocks_of(unit)) {
    if (current_.policy == OverlapPolicy::kSpeculative && !placement_.has_shadow(block.id))
      continue;
    queue(place_of(block.id)).blocks.push_back(block.id);
  }
}

// From here on, blocks come in the order in which the next forward needs them.
void UpdateOrder::queue_rest() {
  queues_ = {};
  for (const BlockId block : forward_blocks_) {
    if (states_[index_of(block)] == State::kWaiting) queue(place_of(block)).blocks.push_back(block);
  }
}

// A block that is updated in place has nothing to read ahead.
std::optional<BlockId> UpdateOrder::next(UpdatePlace place) const {
  const Queue& from = queue(place);
  if (phase_ == Phase::kIdle || from.next == from.blocks.size()) return std::nullopt;
  const BlockId block = from.blocks[from.next];
  if (place != UpdatePlace::kLane && !may_update(block)) return std::nullopt;
  return block;
}

void UpdateOrder::take_next(UpdatePlace place) {
  Queue& from = queue(place);
  states_[index_of(from.blocks[from.next++])] = State::kStarted;
}

bool UpdateOrder::count_updated(const BlockPlace& block) {
  states_[index_of(block.id)] = State::kUpdated;
  ++updated_count_;
  end_if_complete();
  return --unit_blocks_left_[index_of(block.unit)] == 0;
}

void UpdateOrder::end_if_complete() {
  if (phase_ == Phase::kApplying && updated_count_ == forward_blocks_.size()) phase_ = Phase::kIdle;
}

}  // namespace sluice
