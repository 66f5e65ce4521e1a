#include "engine/flow/optimizer_pass.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>
#include "base/trace/trace_ranges.h"

namespace sluice {
namespace {

// Blocks updated in place need no buffers: this many keep the worker supplied.
constexpr std::uint32_t kInPlaceLanes = 4;
}  // namespace

OptimizerPass::OptimizerPass(const FlowParts& parts, const UpdateParts& own,
                             std::function<void()> on_change)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      slots_(own.slots),
      store_(parts.store),
      scheduler_(parts.scheduler),
      worker_(parts.worker),
      residents_(own.residents),
      leases_(own.leases),
      waiting_(own.waiting),
      commits_(own.commits),
      saver_(own.saver),
      versions_(parts.versions),
      on_change_(std::move(on_change)),
      order_(parts.layout, parts.placement, parts.model.forward_order,
             parts.config.optimizer.untouched),
      late_(parts),
      device_updates_(
          parts, own.residents, own.math,
          [this](UnitId unit, std::uint64_t step) { device_updates_ended(unit, step); }),
      lanes_(parts.placement.lanes.count + kInPlaceLanes),
      buffered_lanes_(parts.placement.lanes.count),
      lane_bytes_(parts.placement.lanes.slot_bytes + parts.placement.lane_gradients.slot_bytes),
      in_lane_(parts.layout.blocks().size(), false),
      left_until_(parts.layout.blocks().size(), 0),
      updates_(parts, own.residents, own.math, [this](Lane& lane) { updated(lane); }),
      transfers_(parts, own.slots, own.commits, [this] { on_change_(); }) {
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    lanes_[lane].index = lane;
    transfers_.attach(lanes_[lane]);
  }
}

void OptimizerPass::announce(const Update& update) {
  order_.announce(update);
  on_change_();
}

void OptimizerPass::fetched(UnitId unit) {
  order_.fetched(unit);
  on_change_();
}

void OptimizerPass::gradient_is_final(UnitId unit) {
  order_.gradient_is_final(unit);
  on_change_();
}

std::uint32_t OptimizerPass::apply(const UnitCoefficients& coefficients, bool as_assumed) {
  const OverlapPolicy policy = order_.current().policy;
  SLUICE_CHECK(as_assumed || policy != OverlapPolicy::kEager, "eager updates cannot be made again");
  if (policy == OverlapPolicy::kSpeculative) {
    // Blocks in shadows become home, or wait for another update.
    for (const BlockPlace& block : layout_.blocks()) {
      if (!order_.is_tentative(block.id)) continue;
      order_.set_waiting(block.id);
      if (!as_assumed) {
        transfers_.drop_shadows(block.id);
        continue;
      }
      transfers_.adopt(block.id);
      count_updated(block, transfers_.up_stream());
    }
    for (Lane& lane : lanes_) settle(lane, as_assumed);
  }
  std::vector<bool> stays(layout_.units().size(), false);
  for (const UnitPlace& unit : layout_.units())
    stays[index_of(unit.id)] = !unit.is_frozen && order_.stays(unit.id);
  count_versions(stays);
  late_.applied(version() + 1, coefficients);
  const bool is_due = commits_ != nullptr && commits_->is_due(version() + 1);
  order_.apply(coefficients);
  for (const UnitPlace& unit : layout_.units()) {
    if (late_.is_lazy() && stays[index_of(unit.id)] && (is_due || late_.has_missed_most(unit.id)))
      catch_up(unit);
  }
  on_change_();
  return static_cast<std::uint32_t>(std::ranges::count(stays, true));
}

void OptimizerPass::count_versions(const std::vector<bool>& stays) {
  for (const UnitPlace& unit : layout_.units()) {
    if (unit.is_frozen) continue;
    if (late_.is_lazy() || !stays[index_of(unit.id)]) {
      versions_.count(unit.id);
      continue;
    }
    for (const BlockPlace& block : layout_.blocks_of(unit.id)) {
      if (holds(block.id)) {
        left_until_[index_of(block.id)] = version() + 1;
      } else if (commits_ != nullptr) {
        commits_->left(block.id, version() + 1);
      }
    }
    if (placement_.is_homed_on_device(unit)) residents_.left(unit.id);
  }
}

// The block is home, updated by `step`.
void OptimizerPass::commit(BlockId block, std::uint64_t step) {
  if (commits_ == nullptr) return;
  commits_->updated(block, step);
  leave_held(block, step + 1);
}

// The block is held no longer: the commits learn of the steps from `first_step` on that have left
// it as it is.
void OptimizerPass::leave_held(BlockId block, std::uint64_t first_step) {
  if (commits_ == nullptr) return;
  const std::uint64_t until = std::exchange(left_until_[index_of(block)], 0);
  for (std::uint64_t step = first_step; step <= until; ++step) commits_->left(block, step);
}

// The coefficients are known: the lane's tentative update counts, or is made again.
void OptimizerPass::settle(Lane& lane, bool adopt) {
  if (lane.is_late) return;
  if (lane.phase == Phase::kUpdating && lane.outcome == Outcome::kHome && !adopt)
    return lane.enter(Phase::kUpdating, Outcome::kRedo);
  if (lane.outcome != Outcome::kTentative) return;
  if (!adopt) {
    slots_.invalidate(lane.slot);
    return lane.enter(lane.phase, Outcome::kRedo);
  }
  const bool is_in_shadow = lane.phase == Phase::kWriting;
  lane.enter(lane.phase, is_in_shadow ? Outcome::kAdopt : Outcome::kHome);
  // Its slot has the new parameters.
  count_updated(layout_.block(lane.block), transfers_.up_stream());
}

void OptimizerPass::cancel() {
  if (!order_.cancel()) return;
  for (const BlockPlace& block : layout_.blocks())
    if (order_.is_tentative(block.id)) transfers_.drop_shadows(block.id);
  const bool is_speculative = order_.current().policy == OverlapPolicy::kSpeculative;
  for (Lane& lane : lanes_) {
    if (lane.is_late) continue;
    if (lane.phase == Phase::kReading || lane.phase == Phase::kLoaded)
      lane.enter(lane.phase, Outcome::kVoid);
    if (!is_speculative) continue;
    if (lane.phase == Phase::kUpdating || lane.outcome == Outcome::kTentative) {
      lane.enter(lane.phase, Outcome::kVoid);
      slots_.invalidate(lane.slot);
    }
  }
  on_change_();
}

void OptimizerPass::stop() {
  is_stopped_ = true;
  on_change_();
}

bool OptimizerPass::is_home() const {
  return is_applied() && late_.is_empty() && device_updates_.is_idle() &&
         std::ranges::none_of(lanes_, [](const Lane& lane) {
           return lane.phase >= Phase::kUpdating || lane.is_late;
         });
}

bool OptimizerPass::has_stored(std::uint64_t version) const {
  if (order_.phase() != UpdateOrder::Phase::kIdle && order_.current().version < version)
    return false;
  if (late_.waits_for(version)) return false;
  return std::ranges::none_of(lanes_, [&](const Lane& lane) {
    return (lane.phase >= Phase::kUpdating || lane.is_late) && lane.step <= version;
  });
}

bool OptimizerPass::is_reading_gradients() const {
  return std::ranges::any_of(
      lanes_, [](const Lane& lane) { return lane.gradients_are == Lane::Gradients::kComing; });
}

bool OptimizerPass::is_partial() const {
  if (is_damaged_ || device_updates_.is_damaged() || !is_applied()) return true;
  if (!is_begun() || order_.current().policy != OverlapPolicy::kEager) return false;
  return order_.updated_count() != 0 || std::ranges::any_of(lanes_, [](const Lane& lane) {
           return lane.phase == Phase::kUpdating;
         });
}

void OptimizerPass::pump() {
  for (Lane& lane : lanes_) advance(lane);
  if (!is_over()) {
    if (order_.may_begin()) order_.begin_announced();
    start_on_device();
    start_late();
    start_lanes(UpdatePlace::kLane);
    start_lanes(UpdatePlace::kInPlace);
    post_updates();
  }
  transfers_.flush();
}

// The device runs enqueued updates in order, so the next step may count on them.
void OptimizerPass::start_on_device() {
  while (const auto id = order_.next(UpdatePlace::kDevice)) {
    const BlockPlace& block = layout_.block(*id);
    // A commit takes the block as it is, once the device reports that it has not overflowed.
    if (commits_ != nullptr && (device_updates_.is_running(block.unit) || is_being_committed(*id)))
      return;
    if (is_being_saved(*id, version()) || !leases_.may_update(*id)) return;
    if (!residents_.is_queued(block.unit)) return;  // the gather of the values before
    order_.take_next(UpdatePlace::kDevice);
    device_updates_.update(block, order_.current().coefficients.of(block.unit));
    const std::uint64_t to = store_.version(*id, Plane::kParameter) + 1;
    store_.advance(*id, Plane::kRecord, to);
    store_.advance(*id, Plane::kParameter, to);
    if (count_updated(block, device_updates_.stream()))
      device_updates_.end_unit(block.unit, version() + 1);
  }
}

// Whether a checkpoint beside training needs the block as it is after `updates` updates.
bool OptimizerPass::is_being_saved(BlockId block, std::uint64_t updates) const {
  if (!saver_.holds(block, updates)) return false;
  saver_.want(block);
  return true;
}

std::vector<BlockId> OptimizerPass::blocks_in_order() const {
  std::vector<BlockId> blocks;
  for (const BlockPlace& block : layout_.blocks()) blocks.push_back(block.id);
  std::ranges::stable_sort(blocks, {}, [this](BlockId block) {
    return std::pair(layout_.is_frozen(block), order_.rank(block));
  });
  return blocks;
}

void OptimizerPass::device_updates_ended(UnitId unit, std::uint64_t step) {
  if (!scheduler_.failed()) {
    for (const BlockPlace& block : layout_.blocks_of(unit)) commit(block.id, step);
  }
  on_change_();
}

void OptimizerPass::start_lanes(UpdatePlace place) {
  const bool is_buffered = place == UpdatePlace::kLane;
  // Blocks that are read ahead stay in their lanes until computation has come to their gradients,
  // and computation may wait for a late update. While an update is being applied, its lanes end by
  // themselves, unless they wait for a commit, which may wait for late updates.
  const bool keeps_one = late_.is_lazy() && (is_applied() || !late_.is_empty());
  const std::uint32_t first = is_buffered ? 0 : buffered_lanes_;
  const std::size_t end = is_buffered ? buffered_lanes_ - (keeps_one ? 1 : 0) : lanes_.size();
  for (std::uint32_t lane = first; lane < end; ++lane) {
    if (lanes_[lane].phase != Phase::kFree) continue;
    const auto block = order_.next(place);
    if (!block || !start(lanes_[lane], *block)) return;
    order_.take_next(place);
  }
}

// Whether `lane` is updated before `than`.
bool OptimizerPass::is_next(const Lane& lane, const Lane& than) const {
  if (lane.is_late != than.is_late) return lane.is_late;
  if (!is_applied()) return order_.rank(lane.block) < order_.rank(than.block);
  return lane.sequence < than.sequence;
}

void OptimizerPass::post_updates() {
  while (Lane* const lane = next_to_update()) {
    lane->enter(Phase::kUpdating);
    if (!lane->is_late)
      lane->coefficients = order_.current().coefficients.of(layout_.block(lane->block).unit);
    lane->is_assuming = order_.updates_are_tentative() && !lane->is_late;
    if (lane->slot != Lane::kNoSlot) slots_.invalidate(lane->slot);
    updates_.start(*lane);
  }
  updates_.flush();
}

// The lane that is updated next, or null.
OptimizerLane* OptimizerPass::next_to_update() {
  Lane* best = nullptr;
  for (Lane& lane : lanes_) {
    if (lane.phase != Phase::kLoaded || lane.outcome == Outcome::kVoid) continue;
    if (best != nullptr && !is_next(lane, *best)) continue;
    if (!(lane.is_late || order_.may_update(lane.block)) || !leases_.may_update(lane.block) ||
        !updates_.may_start(lane))
      continue;
    // If the schedule has changed, the unit may be used again after its gradient was final.
    if (lane.slot != Lane::kNoSlot && slots_.is_being_copied(lane.slot)) continue;
    best = &lane;
  }
  return best;
}

void OptimizerPass::updated(Lane& lane) {
  const bool counts = lane.is_permanent();
  if (lane.overflow && counts && !order_.updates_are_tentative()) scheduler_.fail(*lane.overflow);
  if (scheduler_.failed()) {
    is_damaged_ = is_damaged_ || !order_.updates_are_tentative();
    release(lane, /*keep_parameters=*/false);
  } else if (lane.outcome == Outcome::kVoid) {
    release(lane, /*keep_parameters=*/false);
  } else if (lane.outcome == Outcome::kRedo) {
    load(lane);
  } else if (lane.overflow) {
    order_.set_waiting(lane.block);
    release(lane, /*keep_parameters=*/false);
  } else {
    take_effect(lane);
  }
  on_change_();
}

WaitCause OptimizerPass::waits_for(std::optional<BlockId> block) const {
  WaitCause cause{.reason = TraceReason::kUpdateLane};
  if (block) cause = {cause.reason, index_of(layout_.block(*block).unit), index_of(*block)};
  Phase last = Phase::kFree;  // the least advanced phase so far
  for (const Lane& lane : lanes_) {
    if (lane.phase == Phase::kFree || (block && lane.block != *block)) continue;
    if (last == Phase::kFree || lane.phase < last) last = lane.phase;
    if (lane.phase == Phase::kLoaded) return cause.with(TraceReason::kUpdate);
  }
  if (block && last == Phase::kFree && is_being_committed(*block))
    return cause.with(TraceReason::kCommit);
  if (last == Phase::kFree && (block ? saver_.holds(*block, version()) : saver_.is_wanted()))
    return cause.with(TraceReason::kSave);
  if (last == Phase::kUpdated) return cause.with(TraceReason::kCommit);
  if (last == Phase::kReading) return cause.with(TraceReason::kUpdateRead);
  if (last == Phase::kUpdating) return cause.with(TraceReason::kUpdate);
  return last == Phase::kWriting ? cause.with(TraceReason::kUpdateWrite) : cause;
}

}  // namespace sluice
