// The way of a block through a lane of the optimizer pass: in, updated, and home again.
#include <algorithm>

#include <sluice/error.h>
#include "base/trace/trace_recorder.h"
#include "engine/flow/optimizer_pass.h"

namespace sluice {

// Returns false when the block has to wait for something first.
bool OptimizerPass::start(Lane& lane, BlockId block, const LateUpdates::Entry* late) {
  lane.step = late != nullptr ? late->step : version() + 1;
  // The update before, or its commit, is still writing it.
  if (in_lane_[index_of(block)] || is_being_committed(block) ||
      is_being_saved(block, lane.step - 1))
    return false;
  std::uint32_t slot = Lane::kNoSlot;
  if (placement_.update_takes_slot(block)) {
    if (const auto bound = slots_.find(block)) {
      slot = *bound;
      slots_.join(slot, SlotUser::kPass);
    } else {
      const auto taken = slots_.take(block, SlotUser::kPass);
      if (!taken) return false;
      slot = *taken;
    }
  }
  in_lane_[index_of(block)] = true;
  ++lanes_busy_;
  if (lane.index < buffered_lanes_) scheduler_.pools().lend(MemoryPool::kLanes, lane_bytes_);
  const UnitId unit = layout_.block(block).unit;
  const bool fetches_gradients = placement_.lane_fetches_gradients(unit) && late == nullptr;
  lane.block = block;
  lane.slot = slot;
  lane.parameters =
      slot == Lane::kNoSlot ? tiers_.parameters_at_home(layout_.block(block)) : slots_.data(slot);
  lane.record = placement_.record_tier[index_of(block)] == Tier::kHost ? tiers_.host_record(block)
                                                                       : tiers_.lane(lane.index);
  lane.gradients_are = fetches_gradients ? Lane::Gradients::kWanted : Lane::Gradients::kHere;
  lane.is_late = late != nullptr;
  if (lane.is_late) {
    lane.gradients = late_.zeros();
    lane.version = store_.version(block, Plane::kRecord);
    lane.to_version = late->version;
    lane.missed = late_.missed(*late, lane.version);
    late_bytes_ += layout_.parameter_slot_bytes(block) + layout_.record_slot_bytes(block);
  } else {
    lane.gradients = fetches_gradients ? tiers_.lane_gradient(lane.index)
                                       : tiers_.waiting_gradient(layout_.block(block));
    // From apply() on, the unit's version counts this update.
    lane.version = versions_.of(unit) - (order_.phase() == UpdateOrder::Phase::kApplying ? 1 : 0);
    lane.to_version = lane.version + 1;
  }
  lane.sequence = starts_++;
  lane.begin_ns = trace_now_ns();
  load(lane);
  return true;
}

void OptimizerPass::load(Lane& lane) {
  lane.enter(Phase::kReading, Outcome::kHome);
  if (transfers_.load(lane)) advance(lane);
}

void OptimizerPass::advance(Lane& lane) {
  switch (lane.phase) {
    case Phase::kFree:
    case Phase::kUpdating: return;
    case Phase::kReading: return finish_reading(lane);
    case Phase::kLoaded:
      if (lane.outcome == Outcome::kVoid || is_over()) release(lane, /*keep_parameters=*/false);
      return;
    case Phase::kUpdated: return advance_updated(lane);
    case Phase::kWriting:
      if (transfers_.is_written(lane)) finish_writing(lane);
      return;
  }
}

void OptimizerPass::finish_reading(Lane& lane) {
  if (lane.gradients_are == Lane::Gradients::kWanted && lane.outcome != Outcome::kVoid &&
      !is_over()) {
    if (!order_.may_update(lane.block)) return;
    transfers_.load_gradients(lane);
  }
  if (!transfers_.is_read(lane)) return;
  lane.enter(Phase::kLoaded);
  advance(lane);
}

void OptimizerPass::finish_writing(Lane& lane) {
  if (scheduler_.failed()) {
    if (lane.is_permanent()) is_damaged_ = true;
    return release(lane, /*keep_parameters=*/false);
  }
  switch (lane.outcome) {
    case Outcome::kVoid:
      transfers_.drop_shadows(lane.block);
      return release(lane, /*keep_parameters=*/false);
    case Outcome::kRedo: transfers_.drop_shadows(lane.block); return load(lane);
    case Outcome::kTentative:
      order_.set_tentative(lane.block);
      return release(lane, /*keep_parameters=*/false);
    case Outcome::kAdopt: transfers_.adopt(lane.block); break;
    case Outcome::kHome: break;
  }
  // The next forward needs a block that is updated after the turn; an early one has to wait longer.
  const bool is_early = order_.phase() == UpdateOrder::Phase::kAhead && lane.step == version() + 1;
  const bool is_wanted =
      placement_.parameter_tier[index_of(lane.block)] == Tier::kNvme && !is_early;
  const BlockId block = lane.block;
  release(lane, is_wanted);
  commit(block, lane.step);
}

// The update has been made: in host memory it is permanent, elsewhere it is on its way.
void OptimizerPass::take_effect(Lane& lane) {
  const BlockPlace& block = layout_.block(lane.block);
  const std::uint64_t version = lane.to_version;
  const bool is_tentative = order_.updates_are_tentative() && !lane.is_late;
  lane.enter(Phase::kUpdated, is_tentative ? Outcome::kTentative : Outcome::kHome);
  if (lane.slot != Lane::kNoSlot) slots_.set_version(lane.slot, version);
  if (placement_.record_tier[index_of(block.id)] == Tier::kHost)
    store_.advance(block.id, Plane::kRecord, version);
  const Tier tier = placement_.parameter_tier[index_of(block.id)];
  if (tier != Tier::kNvme) store_.advance(block.id, Plane::kParameter, version);
  if (tier == Tier::kDevice && lane.slot != Lane::kNoSlot) transfers_.copy_to_device(lane);
  if (!is_tentative && !lane.is_late) count_updated(block, transfers_.up_stream());
  advance(lane);
}

void OptimizerPass::advance_updated(Lane& lane) {
  const bool has_ended = lane.outcome == Outcome::kVoid || is_over();
  if (!has_ended && lane.outcome == Outcome::kRedo) return load(lane);
  if (!has_ended && transfers_.may_write(lane)) return write(lane);
  if (!has_ended || lane.pending != 0) return;
  if (scheduler_.failed() && lane.is_permanent()) is_damaged_ = true;
  release(lane, /*keep_parameters=*/false);
}

void OptimizerPass::write(Lane& lane) {
  lane.enter(Phase::kWriting);
  transfers_.write(lane);
  advance(lane);
}

// Counts it after the work on `stream`, if the parameters are at home on the device. Returns true
// when the block is its unit's last.
bool OptimizerPass::count_updated(const BlockPlace& block, StreamId stream) {
  waiting_.consumed(block.id);
  if (!order_.count_updated(block)) return false;
  if (placement_.is_homed_on_device(layout_.unit(block.unit))) {
    transfers_.flush();
    residents_.updated(block.unit, stream);
  }
  return true;
}

void OptimizerPass::release(Lane& lane, bool keep_parameters) {
  trace_span({.begin_ns = lane.begin_ns,
              .end_ns = trace_now_ns(),
              .step = lane.step,
              .unit = index_of(layout_.block(lane.block).unit),
              .block = index_of(lane.block),
              .kind = TraceKind::kLane});
  const bool is_void = lane.outcome == Outcome::kVoid;
  lane.enter(Phase::kFree, Outcome::kHome);
  lane.is_late = false;
  in_lane_[index_of(lane.block)] = false;
  --lanes_busy_;
  if (lane.index < buffered_lanes_) scheduler_.pools().take_back(MemoryPool::kLanes, lane_bytes_);
  if (lane.slot != Lane::kNoSlot) slots_.leave(lane.slot, SlotUser::kPass, keep_parameters);
  // The step that came instead of the cancelled one has the same number, and may have left it.
  if (is_void && !scheduler_.failed()) leave_held(lane.block, lane.step);
  on_change_();
}

void OptimizerPass::catch_up(const UnitPlace& unit) {
  if (!late_.is_lazy() || unit.is_frozen || !placement_.may_stay(unit)) return;
  for (const BlockPlace& block : layout_.blocks_of(unit.id)) {
    const bool is_coming =
        order_.is_pending(block.id) || std::ranges::any_of(lanes_, [&](const Lane& lane) {
          return lane.phase != Phase::kFree && lane.block == block.id &&
                 lane.to_version >= versions_.of(unit.id) && lane.is_permanent();
        });
    if (!is_coming) late_.want(block);
  }
  on_change_();
}

void OptimizerPass::catch_up() {
  for (const UnitPlace& unit : layout_.units()) catch_up(unit);
}

// Computation may wait for these.
void OptimizerPass::start_late() {
  for (std::uint32_t lane = 0; lane < buffered_lanes_ && !late_.is_empty(); ++lane) {
    if (lanes_[lane].phase != Phase::kFree) continue;
    const LateUpdates::Entry entry = late_.front();
    if (!start(lanes_[lane], entry.block, &entry)) return;
    late_.pop();
  }
}

}  // namespace sluice
