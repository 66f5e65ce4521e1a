// A lane of the optimizer pass: brings a block in, and home again.
#include <sluice/error.h>
#include "base/trace/trace.h"
#include "engine/flow/optimizer_pass.h"

namespace sluice {

// Returns false when the block has to wait for something first.
bool OptimizerPass::start(std::uint32_t index, BlockId block) {
  // The update before, or its commit, is still writing it.
  if (in_lane_[index_of(block)] || is_being_committed(block)) return false;
  Lane& lane = lanes_[index];
  std::uint32_t slot = kNone;
  if (placement_.parameter_tier[index_of(block)] != Tier::kHost) {
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
  if (index < buffered_lanes_) scheduler_.pools().lend(MemoryPool::kLanes, lane_bytes());
  lane.block = block;
  lane.slot = slot;
  lane.parameters = slot == kNone ? tiers_.host_parameters(block) : slots_.data(slot);
  lane.record = placement_.record_tier[index_of(block)] == Tier::kHost ? tiers_.host_record(block)
                                                                       : tiers_.lane(index);
  lane.wants_gradients = placement_.gradient_leaves(layout_.block(block).unit);
  lane.gradients =
      lane.wants_gradients ? tiers_.lane_gradient(index) : tiers_.gradient(layout_.block(block));
  lane.version = version();
  lane.sequence = starts_++;
  lane.begin_ns = trace_now_ns();
  lane.is_void = false;
  load(index);
  return true;
}

// Starts the transfers that bring the block's planes into the lane.
void OptimizerPass::load(std::uint32_t index) {
  Lane& lane = lanes_[index];
  lane.phase = LanePhase::kReading;
  lane.is_tentative = false;
  lane.must_adopt = false;
  lane.must_redo = false;
  if (placement_.record_tier[index_of(lane.block)] == Tier::kNvme) {
    ++lane.pending;
    store_.fetch(lane.record_transfer, lane.block, Plane::kRecord, lane.record, lane.version);
  }
  if (lane.slot == kNone || slots_.holds(lane.slot, lane.version)) return advance(index);
  if (placement_.parameter_tier[index_of(lane.block)] == Tier::kDevice) {
    device_.copy(lane.parameters, tiers_.device_parameters(layout_.block(lane.block)),
                 layout_.parameter_bytes(lane.block), down_stream_.id());
    slots_.set_version(lane.slot, lane.version);  // once the copy is done
    add_pending_copy(index, down_stream_.id());
  } else if (!slots_.is_transferring(lane.slot)) {  // otherwise the prefetcher is reading it
    slots_.fetch(lane.slot, lane.version);
  }
}

// Runs once no more gradients are added.
void OptimizerPass::load_gradients(std::uint32_t index) {
  Lane& lane = lanes_[index];
  const BlockPlace& block = layout_.block(lane.block);
  lane.wants_gradients = false;
  lane.is_reading_gradients = true;
  ++lane.pending;
  if (placement_.gradient_tier[index_of(block.unit)] == Tier::kNvme) {
    lane.gradient_transfer.step = lane.version + 1;
    return store_.fetch(lane.gradient_transfer, lane.block, Plane::kGradient,
                        tiers_.lane_gradient(index), store_.version(lane.block, Plane::kGradient));
  }
  device_.copy(tiers_.lane_gradient(index), tiers_.device_gradient(block),
               block.element_count * layout_.format().gradient_bytes(), down_stream_.id());
  device_.notify(down_stream_.id(),
                 [this, index] { scheduler_.post([this, index] { gradients_loaded(index); }); });
}

void OptimizerPass::gradients_loaded(std::uint32_t index) {
  Lane& lane = lanes_[index];
  lane.is_reading_gradients = false;
  --lane.pending;
  on_change_();
}

void OptimizerPass::add_pending_copy(std::uint32_t lane, StreamId stream) {
  ++lanes_[lane].pending;
  device_.notify(stream, [this, lane] {
    scheduler_.post([this, lane] {
      --lanes_[lane].pending;
      on_change_();
    });
  });
}

void OptimizerPass::advance_lanes() {
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) advance(lane);
}

bool OptimizerPass::is_read(const Lane& lane) const {
  if (lane.pending != 0) return false;
  const bool is_over = lane.is_void || scheduler_.failed() || is_stopped_;
  if (lane.wants_gradients && !is_over) return false;
  if (lane.slot == kNone) return true;
  if (scheduler_.failed()) return !slots_.is_transferring(lane.slot);
  return slots_.holds(lane.slot, lane.version);
}

bool OptimizerPass::is_written(const Lane& lane) const {
  return lane.pending == 0 && (lane.slot == kNone || !slots_.is_transferring(lane.slot));
}

void OptimizerPass::advance(std::uint32_t index) {
  Lane& lane = lanes_[index];
  const bool is_over = scheduler_.failed() || is_stopped_;
  switch (lane.phase) {
    case LanePhase::kFree:
    case LanePhase::kUpdating: return;
    case LanePhase::kReading:
      if (lane.wants_gradients && !lane.is_void && !is_over && order_.may_update(lane.block))
        load_gradients(index);
      if (!is_read(lane)) return;
      lane.phase = LanePhase::kLoaded;
      [[fallthrough]];
    case LanePhase::kLoaded:
      if (lane.is_void || is_over) release(index, /*keep_parameters=*/false);
      return;
    case LanePhase::kUpdated: return advance_updated(index);
    case LanePhase::kWriting:
      if (is_written(lane)) finish_writing(index);
      return;
  }
}

void OptimizerPass::finish_writing(std::uint32_t index) {
  Lane& lane = lanes_[index];
  if (scheduler_.failed()) {
    if (!lane.is_tentative) is_damaged_ = true;
    return release(index, /*keep_parameters=*/false);
  }
  if (lane.is_void || lane.must_redo) drop_shadows(lane.block);
  if (lane.is_void) return release(index, /*keep_parameters=*/false);
  if (lane.must_redo) return load(index);
  if (lane.is_tentative) {
    order_.set_tentative(lane.block);
    return release(index, /*keep_parameters=*/false);
  }
  if (lane.must_adopt) {
    store_.adopt(lane.block, Plane::kParameter);
    store_.adopt(lane.block, Plane::kRecord);
  }
  // The next forward needs a block that is updated after the turn; an early one has to wait longer.
  const bool is_early = order_.phase() == UpdateOrder::Phase::kAhead && lane.version == version();
  const bool is_wanted =
      placement_.parameter_tier[index_of(lane.block)] == Tier::kNvme && !is_early;
  const BlockId block = lane.block;
  release(index, is_wanted);
  if (commits_ != nullptr) commits_->updated(block, lane.version + 1);
}

// The update has been made: in host memory it is permanent, elsewhere it is on its way.
void OptimizerPass::take_effect(std::uint32_t index) {
  Lane& lane = lanes_[index];
  const BlockPlace& block = layout_.block(lane.block);
  const std::uint64_t version = lane.version + 1;
  lane.phase = LanePhase::kUpdated;
  lane.is_tentative = order_.updates_are_tentative();
  if (lane.slot != kNone) slots_.set_version(lane.slot, version);
  if (placement_.record_tier[index_of(block.id)] == Tier::kHost)
    store_.advance(block.id, Plane::kRecord, version);
  const Tier tier = placement_.parameter_tier[index_of(block.id)];
  if (tier != Tier::kNvme) store_.advance(block.id, Plane::kParameter, version);
  if (tier == Tier::kDevice) {
    device_.copy(tiers_.device_parameters(block), lane.parameters,
                 layout_.parameter_bytes(block.id), up_stream_.id());
    add_pending_copy(index, up_stream_.id());
  }
  if (!lane.is_tentative) count_updated(block, up_stream_.id());
  advance(index);
}

// Whether the block may be written to storage: an earlier commit has its table, and a copy is free.
bool OptimizerPass::may_write(const Lane& lane) const {
  if (commits_ == nullptr) return true;
  const std::uint32_t i = index_of(lane.block);
  const StoreTarget target = lane.is_tentative ? StoreTarget::kShadow : StoreTarget::kHome;
  const auto may = [&](Tier tier, Plane plane) {
    return tier != Tier::kNvme ||
           (commits_->may_store(lane.version + 1) && store_.may_store(lane.block, plane, target));
  };
  return may(placement_.record_tier[i], Plane::kRecord) &&
         may(placement_.parameter_tier[i], Plane::kParameter);
}

void OptimizerPass::advance_updated(std::uint32_t index) {
  Lane& lane = lanes_[index];
  const bool is_over = lane.is_void || scheduler_.failed() || is_stopped_;
  if (!is_over && lane.must_redo) return load(index);
  if (!is_over && may_write(lane)) return write(index);
  if (!is_over || lane.pending != 0) return;
  if (scheduler_.failed() && !lane.is_tentative) is_damaged_ = true;
  release(index, /*keep_parameters=*/false);
}

void OptimizerPass::write(std::uint32_t index) {
  Lane& lane = lanes_[index];
  const std::uint64_t version = lane.version + 1;
  lane.phase = LanePhase::kWriting;
  const StoreTarget target = lane.is_tentative ? StoreTarget::kShadow : StoreTarget::kHome;
  if (placement_.record_tier[index_of(lane.block)] != Tier::kHost) {
    ++lane.pending;
    store_.store(lane.record_transfer, lane.block, Plane::kRecord, lane.record, version, target);
  }
  if (placement_.parameter_tier[index_of(lane.block)] == Tier::kNvme)
    slots_.store(lane.slot, version, target);
  advance(index);
}

// Counts it after the work on `stream`, if the parameters are at home on the device. Returns true
// when the block is its unit's last.
bool OptimizerPass::count_updated(const BlockPlace& block, StreamId stream) {
  waiting_.consumed(block.id);
  if (!order_.count_updated(block)) return false;
  if (placement_.is_homed_on_device(layout_.unit(block.unit)))
    residents_.updated(block.unit, stream);
  return true;
}

void OptimizerPass::release(std::uint32_t index, bool keep_parameters) {
  Lane& lane = lanes_[index];
  trace_span({.begin_ns = lane.begin_ns,
              .end_ns = trace_now_ns(),
              .step = lane.version + 1,
              .unit = index_of(layout_.block(lane.block).unit),
              .block = index_of(lane.block),
              .kind = TraceKind::kLane});
  lane.phase = LanePhase::kFree;
  in_lane_[index_of(lane.block)] = false;
  --lanes_busy_;
  if (index < buffered_lanes_) scheduler_.pools().take_back(MemoryPool::kLanes, lane_bytes());
  if (lane.slot != kNone) slots_.leave(lane.slot, SlotUser::kPass, keep_parameters);
  on_change_();
}

}  // namespace sluice
