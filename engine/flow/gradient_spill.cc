#include "engine/flow/gradient_spill.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <sluice/error.h>
#include "base/trace/trace_recorder.h"
#include "engine/flow/counted_norm.h"
#include "gpu/device/copy_runs.h"

namespace sluice {

GradientSpill::GradientSpill(const FlowParts& parts, WaitingGradients& waiting, Callbacks callbacks)
    : GradientHome(std::move(callbacks)),
      layout_(parts.layout),
      counted_(parts.counted),
      placement_(parts.placement),
      tiers_(parts.tiers),
      device_(parts.device),
      scheduler_(parts.scheduler),
      worker_(parts.worker),
      store_(parts.store),
      waiting_(waiting),
      slots_(parts.placement.nvme_gradient_bytes == 0 ? 0 : parts.placement.gradient_staging.count),
      sums_(parts.placement.nvme_gradient_bytes == 0 ? 0 : parts.layout.units().size()) {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    slots_[slot].transfer.done = [this, slot] {
      if (slots_[slot].transfer.request.kind == IoKind::kWrite) return home(slot);
      arrived(slots_[slot].partner);
    };
  }
}

void GradientSpill::start(const GradientMove& move, StreamId stream) {
  const UnitId unit = move.range.unit;
  SLUICE_CHECK(is_idle() && placement_.gradient_spills(unit),
               "one gradient at a time leaves, and only for storage");
  move_ = move;
  stream_ = stream;
  sums_[index_of(unit)] = {};
  next_block_ = 0;
  blocks_in_slot_ = move.data == nullptr ? 0 : layout_.unit(unit).block_count;
  blocks_left_ = layout_.unit(unit).block_count;
  pump();
}

// One report for the copies into all slots that are free now.
void GradientSpill::pump() {
  while (next_block_ < layout_.unit(move_.range.unit).block_count && start_block()) {
  }
  if (coming_.empty()) return;
  CopyRuns runs(device_, stream_);
  for (const std::uint32_t slot : coming_) {
    const BlockPlace& block = layout_.block(slots_[slot].block);
    runs.add(tiers_.gradient_staging(slot),
             move_.data + block.offset_elements * layout_.format().gradient_bytes(),
             size_bytes(block.id));
  }
  runs.flush();
  device_.notify(stream_, [this, slots = std::exchange(coming_, {})]() mutable {
    scheduler_.post([this, slots = std::move(slots)] { copied(slots); });
  });
}

void GradientSpill::copied(const std::vector<std::uint32_t>& slots) {
  for (const std::uint32_t slot : slots) {
    arrived(slot);
    if (--blocks_in_slot_ == 0) callbacks_.on_left();
  }
}

std::uint32_t GradientSpill::free_slot() const {
  const auto slot = std::ranges::find(slots_, true, &Slot::is_free);
  return slot == slots_.end() ? kNone : static_cast<std::uint32_t>(slot - slots_.begin());
}

std::uint32_t GradientSpill::take_slot(BlockId block) {
  const std::uint32_t index = free_slot();
  Slot& slot = slots_[index];
  slot.is_free = false;
  scheduler_.pools().lend(MemoryPool::kGradientStaging, placement_.gradient_staging.slot_bytes);
  slot.block = block;
  slot.partner = kNone;
  slot.pending = 0;
  return index;
}

void GradientSpill::free(std::uint32_t slot) {
  slots_[slot].is_free = true;
  scheduler_.pools().take_back(MemoryPool::kGradientStaging,
                               placement_.gradient_staging.slot_bytes);
}

// Takes both slots that a block needs, or none: two blocks with one slot each would both be stuck.
bool GradientSpill::start_block() {
  const bool adds = !move_.is_first;
  if (std::ranges::count(slots_, true, &Slot::is_free) < (adds ? 2 : 1)) return false;
  const BlockId block = layout_.blocks_of(move_.range.unit)[next_block_++].id;
  const std::uint32_t slot = take_slot(block);
  slots_[slot].pending = 1;  // held until everything has been requested
  if (move_.data != nullptr) {
    ++slots_[slot].pending;
    coming_.push_back(slot);
  }
  if (adds) fetch_sum(slot);
  arrived(slot);
  return true;
}

// Brings the sum so far into a slot of its own.
void GradientSpill::fetch_sum(std::uint32_t slot) {
  const BlockId block = slots_[slot].block;
  const std::uint32_t sum = take_slot(block);
  slots_[slot].partner = sum;
  slots_[sum].partner = slot;
  if (scheduler_.failed()) return;  // storage itself may have failed
  ++slots_[slot].pending;
  slots_[sum].transfer.step = move_.step;
  store_.fetch(slots_[sum].transfer, block, Plane::kGradient, tiers_.gradient_staging(sum),
               store_.version(block, Plane::kGradient));
}

void GradientSpill::arrived(std::uint32_t slot) {
  if (--slots_[slot].pending != 0) return;
  worker_.post([this, slot] { add(slot); }, [this, slot] { added(slot); });
}

// On the worker's thread.
void GradientSpill::add(std::uint32_t index) {
  const std::uint64_t begin_ns = trace_now_ns();
  const Slot& slot = slots_[index];
  const BlockPlace& block = layout_.block(slot.block);
  const DType type = layout_.format().gradient;
  std::byte* sum = tiers_.gradient_staging(index);
  if (move_.data == nullptr) std::memset(sum, 0, size_bytes(slot.block));
  if (slot.partner != kNone) sum = tiers_.gradient_staging(slot.partner);
  Sum& unit = sums_[index_of(block.unit)];
  const NormAccumulator norm =
      counted_norm(layout_, counted_, block.unit, block.offset_elements, block.element_count,
                   [&](std::uint64_t begin, std::uint64_t count, NormAccumulator& part) {
                     const std::uint64_t at =
                         (begin - block.offset_elements) * layout_.format().gradient_bytes();
                     if (slot.partner == kNone)
                       return worker_.optimizer().add_squared_norm(type, sum + at, count, part);
                     worker_.optimizer().accumulate_with_norm(
                         type, sum + at, tiers_.gradient_staging(index) + at, count, part);
                   });
  unit.norm.merge(norm);
  if (!norm.finite()) {
    const std::optional<std::uint64_t> at = find_non_finite(type, sum, block.element_count);
    const std::uint64_t before = unit.first_non_finite.value_or(UINT64_MAX);
    if (at) unit.first_non_finite = std::min(before, block.offset_elements + *at);
  }
  trace_span({.begin_ns = begin_ns,
              .end_ns = trace_now_ns(),
              .size_bytes = size_bytes(slot.block),
              .step = move_.step,
              .unit = index_of(block.unit),
              .block = index_of(block.id),
              .kind = slot.partner == kNone ? TraceKind::kNorm : TraceKind::kAccumulate});
}

void GradientSpill::added(std::uint32_t index) {
  const std::uint32_t partner = slots_[index].partner;
  if (partner == kNone) return send_home(index);
  free(index);
  send_home(partner);
  pump();
}

void GradientSpill::send_home(std::uint32_t index) {
  Slot& slot = slots_[index];
  if (scheduler_.failed()) return home(index);
  slot.transfer.step = move_.step;
  waiting_.written(slot.block);
  store_.store(slot.transfer, slot.block, Plane::kGradient, tiers_.gradient_staging(index),
               store_.version(slot.block, Plane::kGradient) + 1);
}

void GradientSpill::home(std::uint32_t index) {
  free(index);
  pump();
  if (--blocks_left_ == 0) callbacks_.on_home();
}

std::optional<std::uint64_t> GradientSpill::first_non_finite(const GradientRange& range) const {
  const std::optional<std::uint64_t> element = sums_[index_of(range.unit)].first_non_finite;
  if (!element || *element < range.begin || *element >= range.begin + range.count)
    return std::nullopt;
  return *element - range.begin;
}

}  // namespace sluice
