#include "engine/flow/gradient_drain.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {

GradientDrain::GradientDrain(const FlowParts& parts, const ResidentUnits& residents,
                             WaitingGradients& waiting, DeviceMath* math,
                             std::function<void(UnitId)> on_final)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      device_(parts.device),
      scheduler_(parts.scheduler),
      worker_(parts.worker),
      ranks_(parts.ranks),
      residents_(residents),
      waiting_(waiting),
      math_(math),
      on_final_(std::move(on_final)),
      staging_(parts.placement.gradient_staging.count),
      units_(parts.layout.units().size()),
      unit_norms_(parts.layout.units().size()),
      spill_(parts, waiting,
             {.on_left = [this] { spill_left(); }, .on_home = [this] { spill_home(); }}),
      zero_stream_(parts.device, "gradient zeros", StreamPriority::kHigh),
      copy_stream_(parts.device, "gradients down", StreamPriority::kHigh) {
  free_slots_.reserve(parts.placement.gradient_slots.count);
  for (std::uint32_t slot = 0; slot < parts.placement.gradient_slots.count; ++slot) {
    zeroed_events_.emplace_back(parts.device);
    zero(slot, parts.placement.gradient_slots.slot_bytes);
    free_slots_.push_back(slot);
  }
  for (const UnitPlace& unit : parts.layout.units()) trained_units_ += unit.is_frozen ? 0 : 1;
}

void GradientDrain::begin(std::uint64_t step, bool reduces_each) {
  SLUICE_CHECK(idle(), "a step begins when the drain of the one before has ended");
  step_ = step;
  reduces_each_ = reduces_each;
  units_.assign(units_.size(), {});
  final_units_ = 0;
  units_without_gradient_ = 0;
  is_closing_ = false;
  is_over_ = false;
  was_reopened_ = false;
  waiting_.begin_step();
}

// Runs as soon as a slot is free, so that computation finds it ready.
void GradientDrain::zero(std::uint32_t slot, std::uint64_t size_bytes) {
  device_.fill_zero(tiers_.gradient_slot(slot), size_bytes, zero_stream_.id());
  device_.record(zeroed_events_[slot].id(), zero_stream_.id());
}

std::optional<std::uint32_t> GradientDrain::try_take_slot() {
  if (free_slots_.empty()) return std::nullopt;
  const std::uint32_t slot = free_slots_.front();
  free_slots_.erase(free_slots_.begin());
  scheduler_.pools().lend(MemoryPool::kGradientSlots, placement_.gradient_slots.slot_bytes);
  return slot;
}

void GradientDrain::release(const ScheduledUse& use, std::uint32_t slot, EventId computed) {
  // The copy stream reaches the waits in order of release, as it does the copies.
  device_.wait(copy_stream_.id(), computed);
  Unit& unit = units_[index_of(use.unit)];
  if (unit.is_final) --final_units_;
  was_reopened_ = was_reopened_ || unit.is_whole;
  unit.is_whole = unit.is_final = false;
  unit.is_closed = unit.is_closed || use.final_gradient;
  ++unit.jobs;
  jobs_.push_back(
      {.use = use,
       .is_first = !unit.has_gradient,
       .slot = slot,
       .released_ns = trace_now_ns(),
       .range = begin_trace_range({.unit = index_of(use.unit), .kind = kind_of(use.unit)})});
  if (!unit.has_gradient) add_waiting(use.unit);
  unit.has_gradient = true;
  device_.notify(copy_stream_.id(), [this] {
    scheduler_.post(
        [this] { std::ranges::find(jobs_, 0u, &Job::computed_ns)->computed_ns = trace_now_ns(); });
  });
  pump();
}

void GradientDrain::pump() {
  if (jobs_.empty()) return;
  Job& job = jobs_.front();
  if (!front_is_started_) {
    front_is_started_ = true;
    start(job);
  }
  if (job.is_first || placement_.gradient_leaves(job.use.unit)) return;
  while (job.next_piece < piece_count(job) && start_piece(job)) {
  }
}

void GradientDrain::start(Job& job) {
  if (job.has_slot && ranks_.are_several() && reduces_each_) reduce(job);
  if (placement_.gradient_spills(job.use.unit)) {
    start_spill(job);
  } else if (placement_.gradient_is_on_device(job.use.unit)) {
    start_on_device(job);
  } else if (job.is_first) {
    start_copy(job);
  } else {
    job.copies_left = job.additions_left = piece_count(job);
  }
}

void GradientDrain::start_spill(Job& job) {
  job.copies_left = job.has_slot ? 1 : 0;
  job.additions_left = 1;
  spill_.start({.unit = job.use.unit,
                .data = job.has_slot ? tiers_.gradient_slot(job.slot) : nullptr,
                .is_first = job.is_first,
                .step = step_},
               copy_stream_.id());
}

void GradientDrain::spill_left() {
  Job& job = jobs_.front();
  job.copies_left = 0;
  trace_copy(job);
  move_front();
}

void GradientDrain::spill_home() {
  jobs_.front().additions_left = 0;
  move_front();
  pump();
}

// The job's range in the set: this rank's part once it is reduced, otherwise everything it keeps.
GradientDrain::Range GradientDrain::range_of(const Job& job) const {
  const UnitId unit = job.use.unit;
  if (job.is_reduced) return owned(unit);
  return {.unit = unit, .begin = layout_.set_begin(unit), .count = layout_.set_elements(unit)};
}

std::uint32_t GradientDrain::piece_count(const Job& job) const {
  return static_cast<std::uint32_t>(div_ceil(range_of(job).count, layout_.block_elements()));
}

std::byte* GradientDrain::in_set(const Range& range) const {
  return tiers_.gradient_set(range.unit) +
         (range.begin - layout_.set_begin(range.unit)) * layout_.format().gradient_bytes();
}

// For traces: pieces of parts that other ranks update are not blocks.
std::uint32_t GradientDrain::block_of(const Range& piece) const {
  const UnitPlace& unit = layout_.unit(piece.unit);
  if (layout_.shard().keeps_all_gradients && !reduces_each_) return kTraceNone;
  return unit.first_block +
         static_cast<std::uint32_t>((piece.begin - unit.shard_begin) / layout_.block_elements());
}

// The part of the unit that this rank updates.
GradientDrain::Range GradientDrain::owned(UnitId id) const {
  const UnitPlace& unit = layout_.unit(id);
  return {.unit = id, .begin = unit.shard_begin, .count = unit.shard_elements};
}

// One copy straight into the set: the unit's first gradient of the step needs no addition.
void GradientDrain::start_copy(Job& job) {
  const Range range = range_of(job);
  const std::uint64_t element_bytes = layout_.format().gradient_bytes();
  job.copies_left = 1;
  device_.copy(in_set(range), tiers_.gradient_slot(job.slot) + range.begin * element_bytes,
               range.count * element_bytes, copy_stream_.id());
  device_.notify(copy_stream_.id(), [this] { scheduler_.post([this] { copy_done(); }); });
}

// Where each use's gradient is reduced, the other ranks' parts do not come to the set.
void GradientDrain::add_waiting(UnitId unit) {
  waiting_.add(unit, /*keeps_others=*/!ranks_.are_several() || !reduces_each_);
}

// In the slot, this rank's part becomes the sum over the ranks.
void GradientDrain::reduce(Job& job) {
  job.is_reduced = true;
  ranks_.reduce(layout_.unit(job.use.unit), tiers_.gradient_slot(job.slot),
                layout_.format().gradient, step_, copy_stream_.id());
  is_reducing_ = true;
  device_.notify(copy_stream_.id(), [this] { scheduler_.post([this] { is_reducing_ = false; }); });
}

// The set holds the sum over the step's uses, which is still to be added over the ranks.
bool GradientDrain::awaits_reduction(const Job& job) const {
  return ranks_.are_several() && !reduces_each_ && job.use.final_gradient && !job.is_reduced;
}

// The sum is copied up into the slot, reduced there, and copied back.
void GradientDrain::start_last_reduction(Job& job) {
  device_.copy(tiers_.gradient_slot(job.slot), tiers_.gradient_set(job.use.unit),
               layout_.unit_gradient_bytes(job.use.unit), copy_stream_.id());
  reduce(job);
  start_copy(job);
  waiting_.drop_others(job.use.unit);
}

bool GradientDrain::start_piece(Job& job) {
  for (std::uint32_t slot = 0; slot < staging_.size(); ++slot) {
    if (!staging_[slot].is_free) continue;
    const Range range = range_of(job);
    const std::uint64_t from = job.next_piece++ * layout_.block_elements();
    const Range piece{.unit = range.unit,
                      .begin = range.begin + from,
                      .count = std::min(layout_.block_elements(), range.count - from)};
    const std::uint64_t element_bytes = layout_.format().gradient_bytes();
    staging_[slot] = {.piece = piece, .is_free = false};
    scheduler_.pools().lend(MemoryPool::kGradientStaging, placement_.gradient_staging.slot_bytes);
    device_.copy(tiers_.gradient_staging(slot),
                 tiers_.gradient_slot(job.slot) + piece.begin * element_bytes,
                 piece.count * element_bytes, copy_stream_.id());
    device_.notify(copy_stream_.id(),
                   [this, slot] { scheduler_.post([this, slot] { piece_copied(slot); }); });
    return true;
  }
  return false;
}

void GradientDrain::piece_copied(std::uint32_t staging_slot) {
  worker_.post([this, staging_slot] { add_piece(staging_slot); },
               [this, staging_slot] { piece_added(staging_slot); });
  copy_done();
}

// On the worker's thread.
void GradientDrain::add_piece(std::uint32_t staging_slot) {
  const Range& piece = staging_[staging_slot].piece;
  const StateFormat& format = layout_.format();
  const TraceScope scope({.size_bytes = piece.count * format.gradient_bytes(),
                          .step = step_,
                          .unit = index_of(piece.unit),
                          .block = block_of(piece),
                          .kind = TraceKind::kAccumulate});
  worker_.optimizer().accumulate(format.gradient, in_set(piece),
                                 tiers_.gradient_staging(staging_slot), piece.count);
}

void GradientDrain::piece_added(std::uint32_t staging_slot) {
  staging_[staging_slot].is_free = true;
  scheduler_.pools().take_back(MemoryPool::kGradientStaging,
                               placement_.gradient_staging.slot_bytes);
  --jobs_.front().additions_left;
  move_front();
  pump();
}

void GradientDrain::copy_done() {
  Job& job = jobs_.front();
  if (--job.copies_left == 0) trace_copy(job);
  move_front();
  pump();
}

TraceKind GradientDrain::kind_of(UnitId unit) const {
  return placement_.gradient_is_on_device(unit) ? TraceKind::kOnDevice : TraceKind::kCopyToHost;
}

void GradientDrain::trace_copy(Job& job) {
  const std::uint64_t now_ns = trace_now_ns();
  const TraceKind kind = kind_of(job.use.unit);
  trace_span({.begin_ns = job.released_ns,
              .end_ns = now_ns,
              .started_ns = std::max(job.computed_ns, copied_ns_),
              .moved_ns = now_ns,
              .size_bytes = layout_.unit_gradient_bytes(job.use.unit),
              .step = step_,
              .unit = index_of(job.use.unit),
              .kind = kind,
              .detail = kind == TraceKind::kOnDevice ? kTraceGradients : std::uint8_t{0}});
  copied_ns_ = now_ns;
  end_trace_range(job.range);
}

WaitCause GradientDrain::waits_for() const {
  if (!jobs_.empty() && !spill_.is_idle() && jobs_.front().copies_left == 0)
    return {.reason = TraceReason::kGradientSpill, .unit = index_of(jobs_.front().use.unit)};
  if (is_reducing_)
    return {.reason = TraceReason::kCollective, .unit = index_of(jobs_.front().use.unit)};
  if (jobs_.empty() || jobs_.front().copies_left == 0)
    return {.reason = norms_in_flight_ == 0 ? TraceReason::kNone : TraceReason::kNorm};
  return {.reason = TraceReason::kGradientCopy, .unit = index_of(jobs_.front().use.unit)};
}

void GradientDrain::move_front() {
  Job& job = jobs_.front();
  if (job.copies_left != 0) return;
  if (job.has_slot && !awaits_reduction(job)) {
    free_slots_.push_back(job.slot);
    zero(job.slot, layout_.unit_gradient_bytes(job.use.unit));  // the rest of it is still zero
    scheduler_.pools().take_back(MemoryPool::kGradientSlots, placement_.gradient_slots.slot_bytes);
    job.has_slot = false;
  }
  if (job.additions_left != 0) return;
  if (awaits_reduction(job)) return start_last_reduction(job);
  const ScheduledUse use = job.use;
  jobs_.pop_front();
  front_is_started_ = false;
  if (--units_[index_of(use.unit)].jobs == 0 && use.final_gradient) start_norm(use.unit);
  close_units();
}

}  // namespace sluice
