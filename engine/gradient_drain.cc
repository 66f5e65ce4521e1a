#include "engine/gradient_drain.h"

#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/error.h"
#include "base/trace.h"

namespace sluice {

GradientDrain::GradientDrain(const Layout& layout, const Placement& placement, const Tiers& tiers,
                             Device& device, Scheduler& scheduler, Worker& worker,
                             std::function<void(UnitId)> on_final)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      device_(device),
      scheduler_(scheduler),
      worker_(worker),
      on_final_(std::move(on_final)),
      slot_is_free_(placement.gradient_slots.count, true),
      staging_(placement.gradient_staging.count),
      units_(layout.units().size()),
      unit_norms_(layout.units().size()),
      copy_stream_(device, "gradients down", StreamPriority::kHigh) {
  for (const UnitPlace& unit : layout.units()) trained_units_ += unit.is_frozen ? 0 : 1;
}

void GradientDrain::begin(std::uint64_t step) {
  SLUICE_CHECK(idle(), "a step begins when the drain of the one before has ended");
  step_ = step;
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
  jobs_.push_back({.use = use, .is_first = !unit.has_gradient, .slot = slot});
  unit.has_gradient = true;
  pump();
}

void GradientDrain::pump() {
  if (jobs_.empty()) return;
  Job& job = jobs_.front();
  if (!front_is_started_) {
    front_is_started_ = true;
    if (job.is_first) {
      start_copy(job);
    } else {
      job.copies_left = job.additions_left = layout_.unit(job.use.unit).block_count;
    }
  }
  while (job.next_piece < layout_.unit(job.use.unit).block_count && !job.is_first &&
         start_piece(job)) {
  }
}

// The unit's first gradient of the step needs no addition: one copy straight into the set.
void GradientDrain::start_copy(Job& job) {
  job.copies_left = 1;
  device_.copy(tiers_.gradient_set(job.use.unit), tiers_.gradient_slot(job.slot),
               layout_.unit_gradient_bytes(job.use.unit), copy_stream_.id());
  device_.call_host(copy_stream_.id(), [this] { scheduler_.post([this] { copy_done(); }); });
}

bool GradientDrain::start_piece(Job& job) {
  for (std::uint32_t slot = 0; slot < staging_.size(); ++slot) {
    if (!staging_[slot].is_free) continue;
    const BlockPlace& block = layout_.blocks_of(job.use.unit)[job.next_piece++];
    const std::uint64_t element_bytes = layout_.format().gradient_bytes();
    staging_[slot] = {.block = index_of(block.id), .is_free = false};
    device_.copy(tiers_.gradient_staging(slot),
                 tiers_.gradient_slot(job.slot) + block.offset_elements * element_bytes,
                 block.element_count * element_bytes, copy_stream_.id());
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
  const std::uint64_t begin_ns = steady_now_ns();
  const BlockPlace& block = layout_.block(BlockId{staging_[staging_slot].block});
  const StateFormat& format = layout_.format();
  worker_.optimizer().accumulate(
      format.gradient,
      tiers_.gradient_set(block.unit) + block.offset_elements * format.gradient_bytes(),
      tiers_.gradient_staging(staging_slot), block.element_count);
  if (trace_enabled()) {
    trace_record({.begin_ns = begin_ns,
                  .end_ns = steady_now_ns(),
                  .size_bytes = block.element_count * format.gradient_bytes(),
                  .step = step_,
                  .unit = index_of(block.unit),
                  .block = index_of(block.id),
                  .kind = TraceKind::kAccumulate});
  }
}

void GradientDrain::piece_added(std::uint32_t staging_slot) {
  staging_[staging_slot].is_free = true;
  --jobs_.front().additions_left;
  finish_front();
  pump();
}

void GradientDrain::copy_done() {
  Job& job = jobs_.front();
  if (--job.copies_left == 0) slot_is_free_[job.slot] = true;
  finish_front();
  pump();
}

void GradientDrain::finish_front() {
  const Job& job = jobs_.front();
  if (job.copies_left != 0 || job.additions_left != 0) return;
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
        if (is_zero) std::memset(tiers_.gradient_set(unit), 0, layout_.unit_gradient_bytes(unit));
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
  const std::uint64_t begin_ns = steady_now_ns();
  NormAccumulator& norm = unit_norms_[index_of(unit)];
  norm = NormAccumulator();
  worker_.optimizer().add_squared_norm(layout_.format().gradient, tiers_.gradient_set(unit),
                                       layout_.unit(unit).element_count, norm);
  if (trace_enabled()) {
    trace_record({.begin_ns = begin_ns,
                  .end_ns = steady_now_ns(),
                  .size_bytes = layout_.unit_gradient_bytes(unit),
                  .step = step_,
                  .unit = index_of(unit),
                  .kind = TraceKind::kNorm});
  }
}

std::string GradientDrain::describe_non_finite() const {
  for (const TensorPlace& tensor : layout_.tensors()) {
    if (layout_.unit(tensor.unit).is_frozen) continue;
    const std::byte* gradient = tiers_.gradient_set(tensor.unit) +
                                tensor.offset_elements * layout_.format().gradient_bytes();
    const auto index = find_non_finite(layout_.format().gradient, gradient, tensor.element_count);
    if (index)
      return fmt::format("the gradient of \"{}\" (unit \"{}\") is not finite at element {}",
                         tensor.name, layout_.unit(tensor.unit).name, *index);
  }
  return "a gradient outside every tensor is not finite";
}

}  // namespace sluice
