#include "engine/flow/gradient_drain.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {

GradientDrain::GradientDrain(const FlowParts& parts, const ResidentUnits& residents,
                             WaitingGradients& waiting, DeviceMath* math,
                             std::function<void(UnitId)> on_final)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      device_(parts.device),
      scheduler_(parts.scheduler),
      ranks_(parts.ranks),
      waiting_(waiting),
      on_final_(std::move(on_final)),
      host_(parts, callbacks()),
      on_device_(parts, residents, math, callbacks()),
      spill_(parts, waiting, callbacks()),
      zeros_(parts),
      units_(parts.layout.units().size()),
      copy_stream_(parts.device, "gradients down", StreamPriority::kHigh) {
  free_slots_.reserve(parts.placement.gradient_slots.count);
  free_local_slots_.reserve(placement_.local_gradient_slots);
  const std::uint32_t slots = parts.placement.gradient_slots.count;
  for (std::uint32_t slot = 0; slot < slots; ++slot) {
    const bool is_local = slot + placement_.local_gradient_slots >= slots;
    (is_local ? free_local_slots_ : free_slots_).push_back(slot);
  }
  for (const UnitPlace& unit : parts.layout.units()) {
    trained_units_ += unit.is_frozen ? 0 : 1;
    homes_.push_back(&host_);
    if (placement_.gradient_is_on_device(unit.id)) homes_.back() = &on_device_;
    if (placement_.gradient_spills(unit.id)) homes_.back() = &spill_;
  }
}

GradientHome::Callbacks GradientDrain::callbacks() {
  return {.on_left = [this] { left(); },
          .on_home = [this] { arrived(); },
          .on_norm = [this](UnitId unit) { norm_taken(unit); }};
}

void GradientDrain::begin(std::uint64_t step, bool reduces_each) {
  SLUICE_CHECK(idle(), "a step begins when the drain of the one before has ended");
  step_ = step;
  reduces_each_ = reduces_each;
  units_.assign(units_.size(), {});
  final_units_ = 0;
  units_without_gradient_ = 0;
  is_closing_ = is_measuring_ = false;
  is_over_ = false;
  was_reopened_ = false;
  waiting_.begin_step();
}

std::optional<std::uint32_t> GradientDrain::try_take_slot(UnitId unit) {
  std::vector<std::uint32_t>& free_slots = free_slots_of(unit);
  if (free_slots.empty()) return std::nullopt;
  const std::uint32_t slot = free_slots.front();
  free_slots.erase(free_slots.begin());
  zeros_.taken(slot, unit);
  scheduler_.pools().lend(MemoryPool::kGradientSlots, placement_.gradient_slots.slot_bytes);
  return slot;
}

bool GradientDrain::try_lend_set(UnitId id) {
  Unit& unit = units_[index_of(id)];
  if (!placement_.leases_gradient_set || placement_.gradient_leaves(id) || unit.has_gradient ||
      std::exchange(unit.has_lent_set, true))
    return false;
  zeros_.lent(id);
  return true;
}

void GradientDrain::release(const ScheduledUse& use, std::optional<std::uint32_t> slot,
                            EventId computed) {
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
       .slot = slot.value_or(0),
       .released_ns = trace_now_ns(),
       .range = slot ? begin_trace_range({.unit = index_of(use.unit), .kind = kind_of(use.unit)})
                     : TraceRangeId{},
       .has_slot = slot.has_value(),
       .is_in_set = !slot.has_value()});
  if (!unit.has_gradient) add_waiting(use.unit);
  unit.has_gradient = true;
  device_.notify(copy_stream_.id(), [this] { scheduler_.post([this] { note_computed(); }); });
  pump();
}

// The first use whose gradient was not there yet has it now. Behind this the stream may already
// wait for computation of later uses, so nothing else there could tell.
void GradientDrain::note_computed() {
  const auto job = std::ranges::find(jobs_, 0u, &Job::computed_ns);
  job->computed_ns = trace_now_ns();
  if (job == jobs_.begin() && front_is_started_ && job->is_in_set) arrived();
}

void GradientDrain::pump() {
  while (!jobs_.empty() && !std::exchange(front_is_started_, true)) {
    Job& job = jobs_.front();
    if (job.has_slot && is_reduced(job.use.unit) && reduces_each(job.use.unit))
      return reduce(job, /*is_last=*/false);
    move_home(job);
    if (!job.is_in_set || job.computed_ns == 0) return;
    job.is_home = true;
    move_front();
  }
}

// This rank's part once it is reduced, otherwise everything that it keeps.
void GradientDrain::move_home(Job& job) {
  const UnitId unit = job.use.unit;
  const GradientRange kept{
      .unit = unit, .begin = layout_.set_begin(unit), .count = layout_.set_elements(unit)};
  const GradientRange range = job.is_reduced ? owned_range(layout_, unit) : kept;
  job.moved_bytes = range.count * layout_.format().gradient_bytes();
  job.has_left = !job.has_slot;
  job.is_home = false;
  if (job.is_in_set) return;  // it is there, once it has been computed
  home_of(unit).start({.range = range,
                       .data = job.has_slot ? tiers_.gradient_slot(job.slot) : nullptr,
                       .is_first = job.is_first,
                       .is_last = job.use.final_gradient && !awaits_reduction(job),
                       .step = step_},
                      copy_stream_.id());
}

void GradientDrain::left() {
  Job& job = jobs_.front();
  job.has_left = true;
  trace_copy(job);
  move_front();
}

void GradientDrain::arrived() {
  jobs_.front().is_home = true;
  move_front();
  pump();
}

// Where each use's gradient is reduced, the other ranks' parts do not come to the set.
void GradientDrain::add_waiting(UnitId unit) {
  waiting_.add(unit, /*keeps_others=*/!is_reduced(unit) || !reduces_each(unit));
}

bool GradientDrain::reduces_each(UnitId unit) const {
  return reduces_each_ || layout_.unit(unit).is_announced;
}

// In the slot, this rank's part becomes the sum over the ranks, which then goes home. `is_last`:
// it takes the place of the rank's own sum over the step.
void GradientDrain::reduce(Job& job, bool is_last) {
  job.is_reduced = true;
  is_reducing_ = true;
  const auto then = [this, is_last] {
    device_.notify(copy_stream_.id(),
                   [this] { scheduler_.post([this] { is_reducing_ = false; }); });
    Job& front = jobs_.front();
    move_home(front);
    if (is_last) waiting_.drop_others(front.use.unit);
  };
  ranks_.reduce(scheduler_,
                {.unit = layout_.unit(job.use.unit),
                 .slot = tiers_.gradient_slot(job.slot),
                 .type = layout_.format().gradient,
                 .step = step_},
                copy_stream_.id(), then);
}

// Its home holds the sum over the step's uses, which is still to be added over the ranks.
bool GradientDrain::awaits_reduction(const Job& job) const {
  return is_reduced(job.use.unit) && !reduces_each(job.use.unit) && job.use.final_gradient &&
         !job.is_reduced;
}

// The sum is copied up into the slot, reduced there, and copied back.
void GradientDrain::start_last_reduction(Job& job) {
  const std::uint64_t size_bytes = layout_.unit_gradient_bytes(job.use.unit);
  device_.copy(tiers_.gradient_slot(job.slot), tiers_.gradient_set(job.use.unit), size_bytes,
               copy_stream_.id());
  if (kind_of(job.use.unit) == TraceKind::kCopyToHost) copied_bytes_ += size_bytes;
  job.is_first = true;
  job.has_left = job.is_home = false;
  reduce(job, /*is_last=*/true);
}

TraceKind GradientDrain::kind_of(UnitId unit) const {
  return placement_.gradient_is_on_device(unit) ? TraceKind::kOnDevice : TraceKind::kCopyToHost;
}

void GradientDrain::trace_copy(Job& job) {
  const std::uint64_t now_ns = trace_now_ns();
  const TraceKind kind = kind_of(job.use.unit);
  if (kind == TraceKind::kCopyToHost) copied_bytes_ += job.moved_bytes;
  trace_span({.begin_ns = job.released_ns,
              .end_ns = now_ns,
              .started_ns = std::max(job.computed_ns, copied_ns_),
              .moved_ns = now_ns,
              .size_bytes = job.moved_bytes,
              .step = step_,
              .unit = index_of(job.use.unit),
              .kind = kind,
              .detail = kind == TraceKind::kOnDevice ? kTraceGradients : std::uint8_t{0}});
  copied_ns_ = now_ns;
  end_trace_range(job.range);
}

WaitCause GradientDrain::waits_for() const {
  if (!jobs_.empty() && !spill_.is_idle() && jobs_.front().has_left)
    return {.reason = TraceReason::kGradientSpill, .unit = index_of(jobs_.front().use.unit)};
  if (is_reducing_)
    return {.reason = TraceReason::kCollective, .unit = index_of(jobs_.front().use.unit)};
  // In the set, a gradient that has been computed is at home.
  if (jobs_.empty() || jobs_.front().is_in_set)
    return {.reason = norms_in_flight_ == 0 ? TraceReason::kNone : TraceReason::kNorm};
  // Once it has left its slot, the worker adds it to the sum.
  return {.reason = jobs_.front().has_left ? TraceReason::kNorm : TraceReason::kGradientCopy,
          .unit = index_of(jobs_.front().use.unit)};
}

void GradientDrain::move_front() {
  Job& job = jobs_.front();
  if (!job.has_left) return;
  if (job.has_slot && !awaits_reduction(job)) {
    free_slots_of(job.use.unit).push_back(job.slot);
    zeros_.left(job.slot, job.use.unit);
    scheduler_.pools().take_back(MemoryPool::kGradientSlots, placement_.gradient_slots.slot_bytes);
    job.has_slot = false;
  }
  if (!job.is_home) return;
  if (awaits_reduction(job)) return start_last_reduction(job);
  const ScheduledUse use = job.use;
  jobs_.pop_front();
  front_is_started_ = false;
  if (--units_[index_of(use.unit)].jobs == 0 && use.final_gradient) start_norm(use.unit);
  close_units();
  measure_units();
}

void GradientDrain::close() {
  if (std::exchange(is_over_, true)) return;
  is_closing_ = true;
  close_units();
}

void GradientDrain::close_units() {
  if (!is_closing_ || !jobs_.empty()) return;
  is_closing_ = false;
  for (const UnitPlace& place : layout_.units()) {
    if (place.is_frozen) continue;
    Unit& unit = units_[index_of(place.id)];
    if (!unit.has_gradient) units_without_gradient_ += place.is_announced ? 0 : 1;
    if (stays(place.id)) {
      unit.is_whole = unit.is_final = true;
      ++final_units_;
    }
    if (unit.is_whole) continue;
    if (!unit.has_gradient) {
      add_waiting(place.id);
      if (kind_of(place.id) == TraceKind::kCopyToHost)
        zero_bytes_ += layout_.set_gradient_bytes(place.id);
    }
    if (unit.has_gradient || !home_of(place.id).moves_zeros()) {
      start_norm(place.id);
      continue;
    }
    ++unit.jobs;
    jobs_.push_back(
        {.use = {.unit = place.id, .final_gradient = true}, .is_first = true, .has_slot = false});
  }
  pump();
}

void GradientDrain::measure() {
  is_measuring_ = true;
  measure_units();
}

// A gradient that has not been the last one by the schedule stays open to further ones.
void GradientDrain::measure_units() {
  if (!is_measuring_ || !jobs_.empty()) return;
  is_measuring_ = false;
  for (const UnitPlace& place : layout_.units()) {
    Unit& unit = units_[index_of(place.id)];
    if (!unit.has_gradient || unit.is_whole) continue;
    ++norms_in_flight_;
    if (++unit.norms == 1) take_norm(place.id);
  }
}

void GradientDrain::start_norm(UnitId unit) {
  units_[index_of(unit)].is_whole = true;
  ++norms_in_flight_;
  if (++units_[index_of(unit)].norms == 1) take_norm(unit);
}

void GradientDrain::take_norm(UnitId unit) {
  home_of(unit).take_norm(
      {.unit = unit, .has_gradient = units_[index_of(unit)].has_gradient, .step = step_},
      copy_stream_.id());
}

void GradientDrain::norm_taken(UnitId id) {
  Unit& unit = units_[index_of(id)];
  --norms_in_flight_;
  if (--unit.norms != 0) return take_norm(id);  // the gradient has changed meanwhile
  if (!unit.is_whole) return;
  unit.is_final = true;
  ++final_units_;
  if (home_of(id).norm(id).finite()) on_final_(id);
}

NormAccumulator GradientDrain::norm() const {
  NormAccumulator norm;
  for (const UnitPlace& unit : layout_.units()) {
    if (!stays(unit.id)) norm.merge(home_of(unit.id).norm(unit.id));
  }
  return norm;
}

NormAccumulator GradientDrain::norm_so_far() const {
  NormAccumulator norm;
  for (const UnitPlace& unit : layout_.units()) {
    if (units_[index_of(unit.id)].has_gradient) norm.merge(home_of(unit.id).norm(unit.id));
  }
  return norm;
}

NormAccumulator GradientDrain::local_norm() const {
  NormAccumulator norm;
  for (const UnitPlace& unit : layout_.units()) {
    if (unit.is_local && units_[index_of(unit.id)].has_gradient)
      norm.merge(home_of(unit.id).norm(unit.id));
  }
  return norm;
}

std::string GradientDrain::describe_non_finite() const {
  for (const TensorPlace& tensor : layout_.tensors()) {
    if (layout_.unit(tensor.unit).is_frozen || stays(tensor.unit)) continue;
    const GradientRange own = owned_range(layout_, tensor.unit);
    const std::uint64_t begin = std::max(tensor.offset_elements, own.begin);
    const std::uint64_t end =
        std::min(tensor.offset_elements + tensor.element_count, own.begin + own.count);
    if (begin >= end) continue;
    const auto index =
        home_of(tensor.unit)
            .first_non_finite({.unit = tensor.unit, .begin = begin, .count = end - begin});
    if (index)
      return fmt::format("the gradient of \"{}\" (unit \"{}\") is not finite at element {}",
                         tensor.name, layout_.unit(tensor.unit).name,
                         begin - tensor.offset_elements + *index);
  }
  return "a gradient outside every tensor is not finite";
}

}  // namespace sluice
