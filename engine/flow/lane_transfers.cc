#include "engine/flow/lane_transfers.h"

#include <utility>

namespace sluice {

LaneTransfers::LaneTransfers(const FlowParts& parts, ParameterSlots& slots, const Commits* commits,
                             std::function<void()> on_change)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      slots_(slots),
      store_(parts.store),
      device_(parts.device),
      scheduler_(parts.scheduler),
      commits_(commits),
      on_change_(std::move(on_change)),
      down_(parts.device, "optimizer down"),
      up_(parts.device, "optimizer up") {}

void LaneTransfers::attach(OptimizerLane& lane) {
  lane.record_transfer.done = [this, &lane] {
    --lane.pending;
    on_change_();
  };
  lane.gradient_transfer.done = [this, &lane] { gradients_loaded(lane); };
}

bool LaneTransfers::load(OptimizerLane& lane) {
  if (placement_.record_tier[index_of(lane.block)] == Tier::kNvme) {
    ++lane.pending;
    lane.record_transfer.step = lane.step;
    store_.fetch(lane.record_transfer, lane.block, Plane::kRecord, lane.record, lane.version);
  }
  if (lane.slot == OptimizerLane::kNoSlot || slots_.holds(lane.slot, lane.version)) return true;
  if (placement_.parameter_tier[index_of(lane.block)] == Tier::kDevice) {
    add(down_,
        {.target = lane.parameters,
         .source = tiers_.device_parameters(layout_.block(lane.block)),
         .size_bytes = layout_.parameter_bytes(lane.block)},
        {.lane = &lane});
    slots_.set_version(lane.slot, lane.version);    // once the copy is done
  } else if (!slots_.is_transferring(lane.slot)) {  // otherwise the prefetcher is reading it
    slots_.fetch(lane.slot, lane.version, lane.step);
  }
  return false;
}

void LaneTransfers::load_gradients(OptimizerLane& lane) {
  const BlockPlace& block = layout_.block(lane.block);
  lane.gradients_are = OptimizerLane::Gradients::kComing;
  if (placement_.gradient_spills(block.unit)) {
    ++lane.pending;
    lane.gradient_transfer.step = lane.step;
    return store_.fetch(lane.gradient_transfer, lane.block, Plane::kGradient,
                        tiers_.lane_gradient(lane.index),
                        store_.version(lane.block, Plane::kGradient));
  }
  add(down_,
      {.target = tiers_.lane_gradient(lane.index),
       .source = tiers_.device_gradient(block),
       .size_bytes = block.element_count * layout_.format().gradient_bytes()},
      {.lane = &lane, .is_gradient = true});
}

void LaneTransfers::gradients_loaded(OptimizerLane& lane) {
  lane.gradients_are = OptimizerLane::Gradients::kHere;
  --lane.pending;
  on_change_();
}

void LaneTransfers::add(Way& way, CopyPiece piece, LaneCopy copy) {
  way.runs.add(piece.target, piece.source, piece.size_bytes);
  copied_bytes_ += piece.size_bytes;
  way.copies.push_back(copy);
  ++copy.lane->pending;
}

void LaneTransfers::flush() {
  flush(down_);
  flush(up_);
}

// One report for all copies of a flush.
void LaneTransfers::flush(Way& way) {
  if (way.copies.empty()) return;
  way.runs.flush();
  device_.notify(way.stream.id(), [this, copies = std::exchange(way.copies, {})]() mutable {
    scheduler_.post([this, copies = std::move(copies)] { ended(copies); });
  });
}

void LaneTransfers::ended(const std::vector<LaneCopy>& copies) {
  for (const LaneCopy& copy : copies) {
    --copy.lane->pending;
    if (copy.is_gradient) copy.lane->gradients_are = OptimizerLane::Gradients::kHere;
  }
  on_change_();
}

bool LaneTransfers::is_read(const OptimizerLane& lane) const {
  if (lane.pending != 0) return false;
  if (lane.slot == OptimizerLane::kNoSlot) return true;
  if (scheduler_.failed()) return !slots_.is_transferring(lane.slot);
  return slots_.holds(lane.slot, lane.version);
}

void LaneTransfers::copy_to_device(OptimizerLane& lane) {
  add(up_,
      {.target = tiers_.device_parameters(layout_.block(lane.block)),
       .source = lane.parameters,
       .size_bytes = layout_.parameter_bytes(lane.block)},
      {.lane = &lane});
}

bool LaneTransfers::may_write(const OptimizerLane& lane) const {
  if (commits_ == nullptr) return true;
  const std::uint32_t i = index_of(lane.block);
  const bool is_tentative = lane.outcome == OptimizerLane::Outcome::kTentative;
  const StoreTarget target = is_tentative ? StoreTarget::kShadow : StoreTarget::kHome;
  const auto may = [&](Tier tier, Plane plane) {
    return tier != Tier::kNvme ||
           (commits_->may_store(lane.step) && store_.may_store(lane.block, plane, target));
  };
  return may(placement_.record_tier[i], Plane::kRecord) &&
         may(placement_.parameter_tier[i], Plane::kParameter);
}

void LaneTransfers::write(OptimizerLane& lane) {
  const std::uint64_t version = lane.to_version;
  const bool is_tentative = lane.outcome == OptimizerLane::Outcome::kTentative;
  const StoreTarget target = is_tentative ? StoreTarget::kShadow : StoreTarget::kHome;
  if (placement_.record_tier[index_of(lane.block)] != Tier::kHost) {
    ++lane.pending;
    lane.record_transfer.step = lane.step;
    store_.store(lane.record_transfer, lane.block, Plane::kRecord, lane.record, version, target);
  }
  if (placement_.parameter_tier[index_of(lane.block)] == Tier::kNvme)
    slots_.store(lane.slot, version, lane.step, target);
}

bool LaneTransfers::is_written(const OptimizerLane& lane) const {
  return lane.pending == 0 &&
         (lane.slot == OptimizerLane::kNoSlot || !slots_.is_transferring(lane.slot));
}

void LaneTransfers::adopt(BlockId block) {
  store_.adopt(block, Plane::kParameter);
  store_.adopt(block, Plane::kRecord);
}

void LaneTransfers::drop_shadows(BlockId block) {
  store_.drop_shadow(block, Plane::kParameter);
  store_.drop_shadow(block, Plane::kRecord);
}

}  // namespace sluice
