#include "engine/optimizer_pass.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/trace_ranges.h"

namespace sluice {
namespace {

// Blocks updated in place need no buffers: so many keep the worker supplied.
constexpr std::uint32_t kInPlaceLanes = 4;
// One update runs, the next waits behind it: more would hold up gradients on the same worker.
constexpr std::uint32_t kUpdatesPostedMax = 2;

}  // namespace

OptimizerPass::OptimizerPass(const Layout& layout, const Placement& placement, const Tiers& tiers,
                             ParameterSlots& slots, BlockStore& store, Device& device,
                             Scheduler& scheduler, Worker& worker, ResidentUnits& residents,
                             std::span<const UnitId> forward_order, std::function<void()> on_change)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      slots_(slots),
      store_(store),
      device_(device),
      scheduler_(scheduler),
      worker_(worker),
      residents_(residents),
      on_change_(std::move(on_change)),
      order_(layout, placement, forward_order),
      lanes_(placement.lanes.count + kInPlaceLanes),
      buffered_lanes_(placement.lanes.count),
      in_lane_(layout.blocks().size(), false),
      down_stream_(device, "optimizer down", StreamPriority::kHigh),
      up_stream_(device, "optimizer up", StreamPriority::kHigh) {
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    lanes_[lane].record_transfer.done = [this, lane] {
      --lanes_[lane].pending;
      on_change_();
    };
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

void OptimizerPass::apply(const StepCoefficients& coefficients, bool as_assumed) {
  const OverlapPolicy policy = order_.current().policy;
  SLUICE_CHECK(as_assumed || policy != OverlapPolicy::kEager, "eager updates cannot be made again");
  if (policy == OverlapPolicy::kSpeculative) settle_tentative(as_assumed);
  order_.apply(coefficients);
  on_change_();
}

// Blocks in shadows become home, or wait to be updated again.
void OptimizerPass::settle_tentative(bool adopt) {
  for (const BlockPlace& block : layout_.blocks()) {
    if (!order_.is_tentative(block.id)) continue;
    order_.set_waiting(block.id);
    if (!adopt) continue;
    store_.adopt(block.id, Plane::kParameter);
    store_.adopt(block.id, Plane::kRecord);
    count_updated(block);
  }
  for (Lane& lane : lanes_) {
    if (lane.phase == LanePhase::kWriting && lane.is_tentative && !lane.is_void) {
      if (adopt) {
        lane.is_tentative = false;
        lane.must_adopt = true;
        count_updated(layout_.block(lane.block));  // its slot has the new parameters
      } else {
        lane.must_redo = true;
        slots_.invalidate(lane.slot);
      }
    } else if (lane.phase == LanePhase::kUpdating && !lane.is_void) {
      lane.must_redo = !adopt;
    }
  }
}

void OptimizerPass::cancel() {
  if (!order_.cancel()) return;
  for (Lane& lane : lanes_) {
    if (lane.phase == LanePhase::kReading || lane.phase == LanePhase::kLoaded) lane.is_void = true;
    if (order_.current().policy != OverlapPolicy::kSpeculative) continue;
    if (lane.phase == LanePhase::kUpdating || lane.is_tentative) {
      lane.is_void = true;
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
  return is_applied() && std::ranges::none_of(lanes_, [](const Lane& lane) {
           return lane.phase == LanePhase::kUpdating || lane.phase == LanePhase::kWriting;
         });
}

bool OptimizerPass::is_partial() const {
  if (is_damaged_ || !is_applied()) return true;
  if (!is_begun() || order_.current().policy != OverlapPolicy::kEager) return false;
  return order_.updated_count() != 0 || std::ranges::any_of(lanes_, [](const Lane& lane) {
           return lane.phase == LanePhase::kUpdating;
         });
}

void OptimizerPass::pump() {
  advance_lanes();
  if (is_stopped_ || scheduler_.failed()) return;
  if (order_.may_begin()) order_.begin_announced();
  start_lanes(/*buffered=*/true);
  start_lanes(/*buffered=*/false);
  post_updates();
}

void OptimizerPass::advance_lanes() {
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) advance(lane);
}

bool OptimizerPass::is_read(const Lane& lane) const {
  if (lane.pending != 0) return false;
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
      if (!is_read(lane)) return;
      lane.phase = LanePhase::kLoaded;
      [[fallthrough]];
    case LanePhase::kLoaded:
      if (lane.is_void || is_over) release(index, /*keep_parameters=*/false);
      return;
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
  // The next forward asks for what is updated after the turn; before it, for something else first.
  const bool is_early = order_.phase() == UpdateOrder::Phase::kAhead && lane.version == version();
  const bool is_wanted =
      placement_.parameter_tier[index_of(lane.block)] == Tier::kNvme && !is_early;
  release(index, is_wanted);
}

void OptimizerPass::start_lanes(bool buffered) {
  const std::uint32_t first = buffered ? 0 : buffered_lanes_;
  const std::size_t end = buffered ? buffered_lanes_ : lanes_.size();
  for (std::uint32_t lane = first; lane < end; ++lane) {
    if (lanes_[lane].phase != LanePhase::kFree) continue;
    const auto block = order_.next(buffered);
    if (!block || !start(lane, *block)) return;
    order_.take_next(buffered);
  }
}

// False when the block has to wait for something first.
bool OptimizerPass::start(std::uint32_t index, BlockId block) {
  if (in_lane_[index_of(block)]) return false;  // still being written by the update before
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
  lane.block = block;
  lane.slot = slot;
  lane.parameters = slot == kNone ? tiers_.host_parameters(block) : slots_.data(slot);
  lane.record = placement_.record_tier[index_of(block)] == Tier::kHost ? tiers_.host_record(block)
                                                                       : tiers_.lane(index);
  lane.version = version();
  lane.sequence = starts_++;
  lane.begin_ns = trace_now_ns();
  lane.is_void = false;
  load(index);
  return true;
}

// Starts what brings the block's planes into the lane.
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
    device_.copy(lane.parameters, resident_block(layout_.block(lane.block)),
                 layout_.parameter_bytes(lane.block), down_stream_.id());
    slots_.set_version(lane.slot, lane.version);  // once the copy is done
    add_pending_copy(index, down_stream_.id());
  } else if (!slots_.is_transferring(lane.slot)) {  // else the prefetcher is reading it
    slots_.fetch(lane.slot, lane.version);
  }
}

void OptimizerPass::add_pending_copy(std::uint32_t lane, StreamId stream) {
  ++lanes_[lane].pending;
  device_.call_host(stream, [this, lane] {
    scheduler_.post([this, lane] {
      --lanes_[lane].pending;
      on_change_();
    });
  });
}

// Whether `lane` goes to the worker before `than`.
bool OptimizerPass::is_next(const Lane& lane, const Lane& than) const {
  if (!is_applied()) return order_.rank(lane.block) < order_.rank(than.block);
  return lane.sequence < than.sequence;
}

void OptimizerPass::post_updates() {
  while (updates_posted_ < kUpdatesPostedMax) {
    std::uint32_t best = kNone;
    for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
      const Lane& lane = lanes_[i];
      if (lane.phase != LanePhase::kLoaded || lane.is_void || !order_.may_update(lane.block))
        continue;
      // Where the schedule has changed, the unit may be used once more after its gradient was
      // final.
      if (lane.slot != kNone && slots_.is_being_copied(lane.slot)) continue;
      if (best == kNone || is_next(lane, lanes_[best])) best = i;
    }
    if (best == kNone) return;
    Lane& lane = lanes_[best];
    lane.phase = LanePhase::kUpdating;
    lane.coefficients = order_.current().coefficients;
    if (lane.slot != kNone) slots_.invalidate(lane.slot);
    ++updates_posted_;
    worker_.post([this, best] { update(best); }, [this, best] { updated(best); });
  }
}

// On the worker's thread. What it throws becomes the scheduler's failure before the block is
// written: on storage it keeps its old version. Blocks before it are updated, so policy "skip"
// cannot hold here.
void OptimizerPass::update(std::uint32_t index) {
  const Lane& lane = lanes_[index];
  const BlockPlace& block = layout_.block(lane.block);
  const TraceScope scope(
      {.size_bytes = layout_.parameter_bytes(lane.block) + layout_.record_bytes(lane.block),
       .step = lane.version + 1,
       .unit = index_of(block.unit),
       .block = index_of(lane.block),
       .kind = TraceKind::kAdam});
  const BlockPlanes planes{
      .parameters = lane.parameters, .record = lane.record, .gradients = tiers_.gradient(block)};
  update_block(layout_, block, planes, lane.coefficients, lane.version + 1, worker_.optimizer());
}

void OptimizerPass::updated(std::uint32_t index) {
  --updates_posted_;
  Lane& lane = lanes_[index];
  if (scheduler_.failed()) {
    is_damaged_ = is_damaged_ || !order_.updates_are_tentative();
    release(index, /*keep_parameters=*/false);
  } else if (lane.is_void) {
    release(index, /*keep_parameters=*/false);
  } else if (lane.must_redo) {
    load(index);
  } else {
    write(index);
  }
  on_change_();
}

void OptimizerPass::write(std::uint32_t index) {
  Lane& lane = lanes_[index];
  const BlockPlace& block = layout_.block(lane.block);
  const std::uint64_t version = lane.version + 1;
  lane.phase = LanePhase::kWriting;
  lane.is_tentative = order_.updates_are_tentative();
  const StoreTarget target = lane.is_tentative ? StoreTarget::kShadow : StoreTarget::kHome;
  if (placement_.record_tier[index_of(block.id)] == Tier::kHost) {
    store_.advance(block.id, Plane::kRecord, version);
  } else {
    ++lane.pending;
    store_.store(lane.record_transfer, block.id, Plane::kRecord, lane.record, version, target);
  }
  if (lane.slot != kNone) slots_.set_version(lane.slot, version);
  switch (placement_.parameter_tier[index_of(block.id)]) {
    case Tier::kHost: store_.advance(block.id, Plane::kParameter, version); break;
    case Tier::kNvme: slots_.store(lane.slot, version, target); break;
    case Tier::kDevice:
      device_.copy(resident_block(block), lane.parameters, layout_.parameter_bytes(block.id),
                   up_stream_.id());
      add_pending_copy(index, up_stream_.id());
      store_.advance(block.id, Plane::kParameter, version);
      break;
  }
  if (!lane.is_tentative) count_updated(block);
  advance(index);
}

void OptimizerPass::count_updated(const BlockPlace& block) {
  if (order_.count_updated(block) && placement_.unit_is_on_device(layout_.unit(block.unit)))
    residents_.updated(block.unit, up_stream_.id());
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
  if (lane.slot != kNone) slots_.leave(lane.slot, SlotUser::kPass, keep_parameters);
  on_change_();
}

WaitCause OptimizerPass::waits_for(std::optional<BlockId> block) const {
  WaitCause cause{.reason = TraceReason::kUpdateLane};
  if (block) cause = {cause.reason, index_of(layout_.block(*block).unit), index_of(*block)};
  LanePhase last = LanePhase::kFree;  // of those looked at, the one that says most
  for (const Lane& lane : lanes_) {
    if (lane.phase == LanePhase::kFree || (block && lane.block != *block)) continue;
    if (last == LanePhase::kFree || lane.phase < last) last = lane.phase;
    if (lane.phase == LanePhase::kLoaded) return cause.with(TraceReason::kUpdate);
  }
  if (last == LanePhase::kReading) return cause.with(TraceReason::kUpdateRead);
  if (last == LanePhase::kUpdating) return cause.with(TraceReason::kUpdate);
  return last == LanePhase::kWriting ? cause.with(TraceReason::kUpdateWrite) : cause;
}

std::byte* OptimizerPass::resident_block(const BlockPlace& block) const {
  return tiers_.resident_parameters(block.unit) +
         block.offset_elements * layout_.format().parameter_bytes();
}

}  // namespace sluice
