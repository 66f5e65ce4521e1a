#include "engine/optimizer_pass.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/trace.h"

namespace sluice {
namespace {

// Blocks updated in place need no buffers: so many keep the worker supplied.
constexpr std::uint32_t kInPlaceLanes = 4;
// One update runs, the next waits behind it: more would hold up gradients on the same worker.
constexpr std::uint32_t kUpdatesPostedMax = 2;

}  // namespace

OptimizerPass::OptimizerPass(const Layout& layout, const Placement& placement, const Tiers& tiers,
                             ParameterSlots& slots, BlockStore& store, Device& device,
                             Scheduler& scheduler, Worker& worker,
                             std::span<const UnitId> forward_order, std::function<void()> on_change)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      slots_(slots),
      store_(store),
      device_(device),
      scheduler_(scheduler),
      worker_(worker),
      on_change_(std::move(on_change)),
      forward_rank_(layout.blocks().size()),
      lanes_(placement.lanes.count + kInPlaceLanes),
      buffered_lanes_(placement.lanes.count),
      in_lane_(layout.blocks().size(), false),
      blocks_(layout.blocks().size(), BlockPhase::kUpdated),
      unit_blocks_left_(layout.units().size(), 0),
      gradient_final_(layout.units().size(), false),
      down_stream_(device, "optimizer down"),
      up_stream_(device, "optimizer up") {
  std::vector<bool> is_ordered(layout.units().size(), false);
  const auto add = [&](UnitId unit) {
    if (is_ordered[index_of(unit)]) return;
    is_ordered[index_of(unit)] = true;
    for (const BlockPlace& block : layout.blocks_of(unit)) {
      forward_rank_[index_of(block.id)] = static_cast<std::uint32_t>(forward_blocks_.size());
      forward_blocks_.push_back(block.id);
    }
  };
  for (const UnitId unit : forward_order) add(unit);
  for (const UnitPlace& unit : layout.units()) {
    add(unit.id);
    resident_events_.emplace_back(device);
  }
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    lanes_[lane].record_transfer.done = [this, lane] {
      --lanes_[lane].pending;
      on_change_();
    };
  }
}

void OptimizerPass::announce(OverlapPolicy policy, std::uint64_t version,
                             const StepCoefficients& assumed) {
  SLUICE_CHECK(phase_ != Phase::kAhead && !next_,
               "an update is announced when the one before has been applied or cancelled");
  next_ = Announced{.policy = policy, .version = version, .assumed = assumed};
  fetched_units_.clear();
  gradient_final_.assign(gradient_final_.size(), false);
  on_change_();
}

void OptimizerPass::begin_announced() {
  current_ = *std::exchange(next_, std::nullopt);
  coefficients_ = current_.assumed;
  phase_ = Phase::kAhead;
  blocks_.assign(blocks_.size(), BlockPhase::kWaiting);
  blocks_updated_ = 0;
  for (const UnitPlace& unit : layout_.units())
    unit_blocks_left_[index_of(unit.id)] = unit.block_count;
  buffered_queue_.clear();
  in_place_queue_.clear();
  next_buffered_ = next_in_place_ = 0;
  if (current_.policy == OverlapPolicy::kDeferred) queue_rest();
  for (const UnitId unit : fetched_units_) append(unit);
}

bool OptimizerPass::updates_early() const {
  return current_.policy == OverlapPolicy::kEager || current_.policy == OverlapPolicy::kSpeculative;
}

bool OptimizerPass::may_be_tentative(BlockId block) const {
  return placement_.storage_copies == 2 &&
         placement_.parameter_tier[index_of(block)] == Tier::kNvme &&
         placement_.record_tier[index_of(block)] == Tier::kNvme;
}

bool OptimizerPass::needs_buffer(BlockId block) const {
  return placement_.record_tier[index_of(block)] == Tier::kNvme ||
         placement_.parameter_tier[index_of(block)] != Tier::kHost;
}

bool OptimizerPass::may_update(BlockId block) const {
  if (phase_ != Phase::kAhead) return phase_ == Phase::kApplying;
  return updates_early() && gradient_final_[index_of(layout_.block(block).unit)];
}

void OptimizerPass::fetched(UnitId unit) {
  fetched_units_.push_back(unit);
  if (is_begun()) append(unit);
  on_change_();
}

// Early updates come in the order in which backward ends with units.
void OptimizerPass::append(UnitId unit) {
  if (!updates_early()) return;
  for (const BlockPlace& block : layout_.blocks_of(unit)) {
    if (current_.policy == OverlapPolicy::kSpeculative && !may_be_tentative(block.id)) continue;
    (needs_buffer(block.id) ? buffered_queue_ : in_place_queue_).push_back(block.id);
  }
}

void OptimizerPass::gradient_is_final(UnitId unit) {
  gradient_final_[index_of(unit)] = true;
  on_change_();
}

void OptimizerPass::apply(const StepCoefficients& coefficients, bool as_assumed) {
  SLUICE_CHECK(is_begun(), "what is applied has been announced");
  SLUICE_CHECK(as_assumed || current_.policy != OverlapPolicy::kEager,
               "eager updates cannot be done again");
  coefficients_ = coefficients;
  phase_ = Phase::kApplying;
  if (current_.policy == OverlapPolicy::kSpeculative) settle_tentative(as_assumed);
  queue_rest();
  on_change_();
}

// Blocks in shadows become home, or wait to be updated again.
void OptimizerPass::settle_tentative(bool adopt) {
  for (const BlockPlace& block : layout_.blocks()) {
    BlockPhase& phase = blocks_[index_of(block.id)];
    if (phase != BlockPhase::kTentative) continue;
    phase = BlockPhase::kWaiting;
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

// From here on in the order in which the next forward will ask.
void OptimizerPass::queue_rest() {
  buffered_queue_.clear();
  in_place_queue_.clear();
  next_buffered_ = next_in_place_ = 0;
  for (const BlockId block : forward_blocks_) {
    if (blocks_[index_of(block)] != BlockPhase::kWaiting) continue;
    (needs_buffer(block) ? buffered_queue_ : in_place_queue_).push_back(block);
  }
}

void OptimizerPass::cancel() {
  if (next_) {
    next_.reset();
    return;
  }
  if (phase_ != Phase::kAhead) return;
  for (Lane& lane : lanes_) {
    if (lane.phase == LanePhase::kReading || lane.phase == LanePhase::kLoaded) lane.is_void = true;
    if (current_.policy != OverlapPolicy::kSpeculative) continue;
    if (lane.phase == LanePhase::kUpdating || lane.is_tentative) {
      lane.is_void = true;
      slots_.invalidate(lane.slot);
    }
  }
  phase_ = Phase::kIdle;
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
  if (is_damaged_ || phase_ == Phase::kApplying) return true;
  if (phase_ != Phase::kAhead || current_.policy != OverlapPolicy::kEager) return false;
  return blocks_updated_ != 0 || std::ranges::any_of(lanes_, [](const Lane& lane) {
           return lane.phase == LanePhase::kUpdating;
         });
}

void OptimizerPass::pump() {
  advance_lanes();
  if (phase_ == Phase::kApplying && blocks_updated_ == blocks_.size()) phase_ = Phase::kIdle;
  if (is_stopped_ || scheduler_.failed()) return;
  if (phase_ == Phase::kIdle && next_) begin_announced();
  start_lanes();
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
    blocks_[index_of(lane.block)] = BlockPhase::kTentative;
    return release(index, /*keep_parameters=*/false);
  }
  if (lane.must_adopt) {
    store_.adopt(lane.block, Plane::kParameter);
    store_.adopt(lane.block, Plane::kRecord);
  }
  // The next forward asks for what is updated after the turn; before it, for something else first.
  const bool is_wanted = placement_.parameter_tier[index_of(lane.block)] == Tier::kNvme &&
                         (phase_ != Phase::kAhead || lane.version != current_.version);
  release(index, is_wanted);
}

void OptimizerPass::start_lanes() {
  if (phase_ == Phase::kIdle) return;
  start_from(buffered_queue_, next_buffered_, 0, buffered_lanes_);
  start_from(in_place_queue_, next_in_place_, buffered_lanes_,
             static_cast<std::uint32_t>(lanes_.size()));
}

void OptimizerPass::start_from(const std::vector<BlockId>& queue, std::size_t& next,
                               std::uint32_t first_lane, std::uint32_t lanes_end) {
  for (std::uint32_t lane = first_lane; lane < lanes_end && next < queue.size(); ++lane) {
    if (lanes_[lane].phase != LanePhase::kFree) continue;
    if (!start(lane, queue[next])) return;
    ++next;
  }
}

// False when the block has to wait for something first.
bool OptimizerPass::start(std::uint32_t index, BlockId block) {
  if (in_lane_[index_of(block)]) return false;  // still being written by the update before
  Lane& lane = lanes_[index];
  const bool is_in_place = !needs_buffer(block);
  if (is_in_place && !may_update(block)) return false;  // there is nothing to read ahead
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
  blocks_[index_of(block)] = BlockPhase::kInLane;
  ++lanes_busy_;
  lane.block = block;
  lane.slot = slot;
  lane.parameters = slot == kNone ? tiers_.host_parameters(block) : slots_.data(slot);
  lane.record = placement_.record_tier[index_of(block)] == Tier::kHost ? tiers_.host_record(block)
                                                                       : tiers_.lane(index);
  lane.version = current_.version;
  lane.sequence = starts_++;
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
  if (phase_ == Phase::kApplying)
    return forward_rank_[index_of(lane.block)] < forward_rank_[index_of(than.block)];
  return lane.sequence < than.sequence;
}

void OptimizerPass::post_updates() {
  while (updates_posted_ < kUpdatesPostedMax) {
    std::uint32_t best = kNone;
    for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
      const Lane& lane = lanes_[i];
      if (lane.phase != LanePhase::kLoaded || lane.is_void || !may_update(lane.block)) continue;
      if (best == kNone || is_next(lane, lanes_[best])) best = i;
    }
    if (best == kNone) return;
    Lane& lane = lanes_[best];
    lane.phase = LanePhase::kUpdating;
    lane.coefficients = coefficients_;
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
  const std::uint64_t begin_ns = steady_now_ns();
  const BlockPlanes planes{.parameters = lane.parameters,
                           .record = lane.record,
                           .gradients = tiers_.gradient_set(block.unit) +
                                        block.offset_elements * layout_.format().gradient_bytes()};
  update_block(layout_, block, planes, lane.coefficients, lane.version + 1, worker_.optimizer());
  if (trace_enabled()) {
    trace_record(
        {.begin_ns = begin_ns,
         .end_ns = steady_now_ns(),
         .size_bytes = layout_.parameter_bytes(lane.block) + layout_.record_bytes(lane.block),
         .step = lane.version + 1,
         .unit = index_of(block.unit),
         .block = index_of(lane.block),
         .kind = TraceKind::kAdam});
  }
}

void OptimizerPass::updated(std::uint32_t index) {
  --updates_posted_;
  Lane& lane = lanes_[index];
  if (scheduler_.failed()) {
    is_damaged_ =
        is_damaged_ || phase_ == Phase::kApplying || current_.policy != OverlapPolicy::kSpeculative;
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
  lane.is_tentative = phase_ == Phase::kAhead && current_.policy == OverlapPolicy::kSpeculative;
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
  blocks_[index_of(block.id)] = BlockPhase::kUpdated;
  ++blocks_updated_;
  const std::uint32_t unit = index_of(block.unit);
  if (--unit_blocks_left_[unit] == 0 && placement_.unit_is_on_device(layout_.unit(block.unit)))
    device_.record(resident_events_[unit].id(), up_stream_.id());
}

void OptimizerPass::release(std::uint32_t index, bool keep_parameters) {
  Lane& lane = lanes_[index];
  lane.phase = LanePhase::kFree;
  in_lane_[index_of(lane.block)] = false;
  --lanes_busy_;
  if (lane.slot != kNone) slots_.leave(lane.slot, SlotUser::kPass, keep_parameters);
  on_change_();
}

std::byte* OptimizerPass::resident_block(const BlockPlace& block) const {
  return tiers_.resident_parameters(block.unit) +
         block.offset_elements * layout_.format().parameter_bytes();
}

}  // namespace sluice
