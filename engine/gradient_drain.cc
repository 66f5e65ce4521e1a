#include "engine/gradient_drain.h"

#include <algorithm>
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
      unit_norms_(layout.units().size()),
      copy_stream_(device, "gradients down") {}

void GradientDrain::begin(std::uint64_t step) {
  SLUICE_CHECK(idle(), "a step begins when the drain of the one before has ended");
  step_ = step;
  final_units_ = 0;
  norm_ = NormAccumulator();
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
  jobs_.push_back({.use = use, .slot = slot, .released_ns = trace_now_ns()});
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
    if (job.use.first_gradient) {
      start_copy(job);
    } else {
      job.copies_left = job.additions_left = layout_.unit(job.use.unit).block_count;
    }
  }
  while (job.next_piece < layout_.unit(job.use.unit).block_count && !job.use.first_gradient &&
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
  const std::uint64_t begin_ns = trace_now_ns();
  const BlockPlace& block = layout_.block(BlockId{staging_[staging_slot].block});
  const StateFormat& format = layout_.format();
  worker_.optimizer().accumulate(
      format.gradient,
      tiers_.gradient_set(block.unit) + block.offset_elements * format.gradient_bytes(),
      tiers_.gradient_staging(staging_slot), block.element_count);
  trace_span({.begin_ns = begin_ns,
              .end_ns = trace_now_ns(),
              .size_bytes = block.element_count * format.gradient_bytes(),
              .step = step_,
              .unit = index_of(block.unit),
              .block = index_of(block.id),
              .kind = TraceKind::kAccumulate});
}

void GradientDrain::piece_added(std::uint32_t staging_slot) {
  staging_[staging_slot].is_free = true;
  --jobs_.front().additions_left;
  finish_front();
  pump();
}

void GradientDrain::copy_done() {
  Job& job = jobs_.front();
  if (--job.copies_left == 0) {
    slot_is_free_[job.slot] = true;
    trace_copy(job);
  }
  finish_front();
  pump();
}

void GradientDrain::trace_copy(const Job& job) {
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
}

WaitCause GradientDrain::waits_for() const {
  if (jobs_.empty() || jobs_.front().copies_left == 0)
    return {.reason = norms_in_flight_ == 0 ? TraceReason::kNone : TraceReason::kNorm};
  return {.reason = TraceReason::kGradientCopy, .unit = index_of(jobs_.front().use.unit)};
}

void GradientDrain::finish_front() {
  const Job& job = jobs_.front();
  if (job.copies_left != 0 || job.additions_left != 0) return;
  if (job.use.final_gradient) start_norm(job.use.unit);
  jobs_.pop_front();
  front_is_started_ = false;
}

void GradientDrain::start_norm(UnitId unit) {
  ++norms_in_flight_;
  worker_.post([this, unit] { take_norm(unit); },
               [this, unit] {
                 norm_.merge(unit_norms_[index_of(unit)]);
                 --norms_in_flight_;
                 ++final_units_;
                 on_final_(unit);
               });
}

// On the worker's thread.
void GradientDrain::take_norm(UnitId unit) {
  const std::uint64_t begin_ns = trace_now_ns();
  NormAccumulator& norm = unit_norms_[index_of(unit)];
  norm = NormAccumulator();
  worker_.optimizer().add_squared_norm(layout_.format().gradient, tiers_.gradient_set(unit),
                                       layout_.unit(unit).element_count, norm);
  trace_span({.begin_ns = begin_ns,
              .end_ns = trace_now_ns(),
              .size_bytes = layout_.unit_gradient_bytes(unit),
              .step = step_,
              .unit = index_of(unit),
              .kind = TraceKind::kNorm});
}

std::string GradientDrain::describe_non_finite() const {
  for (const TensorPlace& tensor : layout_.tensors()) {
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
