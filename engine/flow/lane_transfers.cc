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
      down_stream_(parts.device, "optimizer down", StreamPriority::kHigh),
      up_stream_(parts.device, "optimizer up", StreamPriority::kHigh) {}

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
    copy(lane.parameters, tiers_.device_parameters(layout_.block(lane.block)),
         layout_.parameter_bytes(lane.block), down_stream_.id());
    slots_.set_version(lane.slot, lane.version);  // once the copy is done
    add_pending_copy(lane, down_stream_.id());
  } else if (!slots_.is_transferring(lane.slot)) {  // otherwise the prefetcher is reading it
    slots_.fetch(lane.slot, lane.version, lane.step);
  }
  return false;
}

void LaneTransfers::load_gradients(OptimizerLane& lane) {
  const BlockPlace& block = layout_.block(lane.block);
  lane.gradients_are = OptimizerLane::Gradients::kComing;
  ++lane.pending;
  if (placement_.gradient_spills(block.unit)) {
    lane.gradient_transfer.step = lane.step;
    return store_.fetch(lane.gradient_transfer, lane.block, Plane::kGradient,
                        tiers_.lane_gradient(lane.index),
                        store_.version(lane.block, Plane::kGradient));
  }
  copy(tiers_.lane_gradient(lane.index), tiers_.device_gradient(block),
       block.element_count * layout_.format().gradient_bytes(), down_stream_.id());
  device_.notify(down_stream_.id(),
                 [this, &lane] { scheduler_.post([this, &lane] { gradients_loaded(lane); }); });
}

void LaneTransfers::gradients_loaded(OptimizerLane& lane) {
  lane.gradients_are = OptimizerLane::Gradients::kHere;
  --lane.pending;
  on_change_();
}

void LaneTransfers::copy(std::byte* target, const std::byte* source, std::uint64_t size_bytes,
                         StreamId stream) {
  device_.copy(target, source, size_bytes, stream);
  copied_bytes_ += size_bytes;
}

void LaneTransfers::add_pending_copy(OptimizerLane& lane, StreamId stream) {
  ++lane.pending;
  device_.notify(stream, [this, &lane] {
    scheduler_.post([this, &lane] {
      --lane.pending;
      on_change_();
    });
  });
}

bool LaneTransfers::is_read(const OptimizerLane& lane) const {
  if (lane.pending != 0) return false;
  if (lane.slot == OptimizerLane::kNoSlot) return true;
  if (scheduler_.failed()) return !slots_.is_transferring(lane.slot);
  return slots_.holds(lane.slot, lane.version);
}

void LaneTransfers::copy_to_device(OptimizerLane& lane) {
  copy(tiers_.device_parameters(layout_.block(lane.block)), lane.parameters,
       layout_.parameter_bytes(lane.block), up_stream_.id());
  add_pending_copy(lane, up_stream_.id());
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
