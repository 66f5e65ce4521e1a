#include "engine/gradient_drain.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"

namespace sluice {

GradientDrain::GradientDrain(const Layout& layout, const Placement& placement, const Tiers& tiers,
                             Device& device, Scheduler& scheduler, Worker& worker, Ranks& ranks,
                             std::function<void(UnitId)> on_final)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      device_(device),
      scheduler_(scheduler),
      worker_(worker),
      ranks_(ranks),
      on_final_(std::move(on_final)),
      slot_is_free_(placement.gradient_slots.count, true),
      staging_(placement.gradient_staging.count),
      units_(layout.units().size()),
      unit_norms_(layout.units().size()),
      copy_stream_(device, "gradients down", StreamPriority::kHigh) {
  for (const UnitPlace& unit : layout.units()) trained_units_ += unit.is_frozen ? 0 : 1;
}

void GradientDrain::begin(std::uint64_t step, bool reduces_each) {
  SLUICE_CHECK(idle(), "a step begins when the drain of the one before has ended");
  step_ = step;
  reduces_each_ = reduces_each;
  units_.assign(units_.size(), {});
  final_units_ = 0;
  units_without_gradient_ = 0;
  is_closing_ = false;
  was_reopened_ = false;
}

std::optional<std::uint32_t> GradientDrain::try_take_slot() {
  for (std::uint32_t slot = 0; slot < slot_is_free_.size(); ++slot) {
    if (!slot_is_free_[slot]) continue;
    slot_is_free_[slot] = false;
    return slot;
  }
  return std::nullopt;
}

void GradientDrain::release(const ScheduledUse& use, std::uint32_t slot, EventId computed) {
  // The copy stream meets the waits in order of release, as it meets the copies.
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
       .range = begin_trace_range({.unit = index_of(use.unit), .kind = TraceKind::kCopyToHost})});
  unit.has_gradient = true;
  device_.call_host(copy_stream_.id(), [this] {
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
    if (ranks_.are_several() && reduces_each_) reduce(job);
    if (job.is_first) {
      start_copy(job);
    } else {
      job.copies_left = job.additions_left = piece_count(job);
    }
  }
  while (!job.is_first && job.next_piece < piece_count(job) && start_piece(job)) {
  }
}

// What the job brings to the set: what this rank owns once it is reduced, else all that it keeps.
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

// For traces: pieces of what other ranks update are no blocks.
std::uint32_t GradientDrain::block_of(const Range& piece) const {
  const UnitPlace& unit = layout_.unit(piece.unit);
  if (layout_.shard().keeps_all_gradients && !reduces_each_) return kTraceNone;
  return unit.first_block +
         static_cast<std::uint32_t>((piece.begin - unit.shard_begin) / layout_.block_elements());
}

// What this rank updates of the unit.
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
  device_.call_host(copy_stream_.id(), [this] { scheduler_.post([this] { copy_done(); }); });
}

// In the slot: what this rank owns becomes the sum over the ranks.
void GradientDrain::reduce(Job& job) {
  const UnitPlace& unit = layout_.unit(job.use.unit);
  const DType type = layout_.format().gradient;
  std::byte* const slot = tiers_.gradient_slot(job.slot);
  const std::uint64_t payload_bytes = unit.payload_elements * size_of(type);
  job.is_reduced = true;
  traffic_.reduced_bytes += payload_bytes;
  const CollectiveSpan span{
      .unit = unit.id,
      .size_bytes = payload_bytes,
      .step = step_,
      .detail = ranks_.shard_optimizer() ? kTraceReduce : kTraceReduceAndGather};
  ranks_.reductions().run(span, copy_stream_.id(), [&] {
    Collectives& collectives = ranks_.reductions().collectives();
    if (ranks_.shard_optimizer()) {
      collectives.reduce_scatter({.target = slot + unit.shard_begin * size_of(type),
                                  .target_type = type,
                                  .source = slot,
                                  .source_type = type,
                                  .shard_elements = unit.shard_elements,
                                  .subject = unit.name},
                                 copy_stream_.id());
    } else {
      collectives.all_reduce(
          {.data = slot, .type = type, .element_count = unit.element_count, .subject = unit.name},
          copy_stream_.id());
      traffic_.gathered_bytes += payload_bytes;
    }
  });
  is_reducing_ = true;
  device_.call_host(copy_stream_.id(),
                    [this] { scheduler_.post([this] { is_reducing_ = false; }); });
}

// The set holds the sum over the step's uses, which is still to be added over the ranks.
bool GradientDrain::awaits_reduction(const Job& job) const {
  return ranks_.are_several() && !reduces_each_ && job.use.final_gradient && !job.is_reduced;
}

// The sum goes up into the slot, is reduced there, and comes back.
void GradientDrain::start_last_reduction(Job& job) {
  device_.copy(tiers_.gradient_slot(job.slot), tiers_.gradient_set(job.use.unit),
               layout_.unit_gradient_bytes(job.use.unit), copy_stream_.id());
  reduce(job);
  start_copy(job);
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
    device_.copy(tiers_.gradient_staging(slot),
                 tiers_.gradient_slot(job.slot) + piece.begin * element_bytes,
                 piece.count * element_bytes, copy_stream_.id());
    device_.call_host(copy_stream_.id(),
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

void GradientDrain::trace_copy(Job& job) {
  const std::uint64_t now_ns = trace_now_ns();
  trace_span({.begin_ns = job.released_ns,
              .end_ns = now_ns,
              .started_ns = std::max(job.computed_ns, copied_ns_),
              .moved_ns = now_ns,
              .size_bytes = layout_.unit_gradient_bytes(job.use.unit),
              .step = step_,
              .unit = index_of(job.use.unit),
              .kind = TraceKind::kCopyToHost});
  copied_ns_ = now_ns;
  end_trace_range(job.range);
}

WaitCause GradientDrain::waits_for() const {
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
    slot_is_free_[job.slot] = true;
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

void GradientDrain::close() {
  is_closing_ = true;
  close_units();
}

void GradientDrain::close_units() {
  if (!is_closing_ || !jobs_.empty()) return;
  is_closing_ = false;
  for (const UnitPlace& place : layout_.units()) {
    if (place.is_frozen) continue;
    const Unit& unit = units_[index_of(place.id)];
    if (!unit.has_gradient) ++units_without_gradient_;
    if (!unit.is_whole) start_norm(place.id);
  }
}

void GradientDrain::start_norm(UnitId unit) {
  units_[index_of(unit)].is_whole = true;
  ++units_[index_of(unit)].norms;
  ++norms_in_flight_;
  const bool is_zero = !units_[index_of(unit)].has_gradient;
  worker_.post(
      [this, unit, is_zero] {
        if (is_zero) std::memset(tiers_.gradient_set(unit), 0, layout_.set_gradient_bytes(unit));
        take_norm(unit);
      },
      [this, unit] { norm_taken(unit); });
}

void GradientDrain::norm_taken(UnitId id) {
  Unit& unit = units_[index_of(id)];
  --norms_in_flight_;
  if (--unit.norms != 0 || !unit.is_whole) return;  // the gradient has changed meanwhile
  unit.is_final = true;
  ++final_units_;
  on_final_(id);
}

NormAccumulator GradientDrain::norm() const {
  NormAccumulator norm;
  for (const NormAccumulator& unit : unit_norms_) norm.merge(unit);
  return norm;
}

// On the worker's thread.
void GradientDrain::take_norm(UnitId unit) {
  const TraceScope scope({.size_bytes = owned(unit).count * layout_.format().gradient_bytes(),
                          .step = step_,
                          .unit = index_of(unit),
                          .kind = TraceKind::kNorm});
  NormAccumulator& norm = unit_norms_[index_of(unit)];
  norm = NormAccumulator();
  worker_.optimizer().add_squared_norm(layout_.format().gradient, in_set(owned(unit)),
                                       owned(unit).count, norm);
}

std::string GradientDrain::describe_non_finite() const {
  for (const TensorPlace& tensor : layout_.tensors()) {
    if (layout_.unit(tensor.unit).is_frozen) continue;
    const Range own = owned(tensor.unit);
    const std::uint64_t begin = std::max(tensor.offset_elements, own.begin);
    const std::uint64_t end =
        std::min(tensor.offset_elements + tensor.element_count, own.begin + own.count);
    if (begin >= end) continue;
    const auto index = find_non_finite(
        layout_.format().gradient,
        in_set({.unit = tensor.unit, .begin = begin, .count = end - begin}), end - begin);
    if (index)
      return fmt::format("the gradient of \"{}\" (unit \"{}\") is not finite at element {}",
                         tensor.name, layout_.unit(tensor.unit).name,
                         begin - tensor.offset_elements + *index);
  }
  return "a gradient outside every tensor is not finite";
}

}  // namespace sluice
