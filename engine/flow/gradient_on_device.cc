// Gradients that wait on the device: added there, and their norm taken with the CPU's bits.
#include <cmath>

#include "cpu_optim/gradient_ops.h"
#include "engine/flow/gradient_drain.h"

namespace sluice {

static_assert(kDeviceLeafElements == kAlignElements, "a unit is made of whole leaves");

// Copies from the slot into the set, or adds to the sum there. The update before has read that sum:
// computation waited for it.
void GradientDrain::start_on_device(Job& job) {
  if (job.is_first) return start_copy(job);
  const Range range = range_of(job);
  job.copies_left = 1;
  math_->accumulate(
      layout_.format().gradient, in_set(range),
      tiers_.gradient_slot(job.slot) + range.begin * layout_.format().gradient_bytes(), range.count,
      copy_stream_.id());
  device_.notify(copy_stream_.id(), [this] { scheduler_.post([this] { copy_done(); }); });
}

// One at a time per unit: the sums of its leaves have only one place to arrive in.
void GradientDrain::take_norm_on_device(UnitId unit) {
  const StreamId stream = copy_stream_.id();
  if (!units_[index_of(unit)].has_gradient) {
    device_.wait(stream, residents_.event(unit));
    device_.fill_zero(tiers_.gradient_set(unit), layout_.set_gradient_bytes(unit), stream);
  }
  const Range range = owned(unit);
  const std::byte* const leaves = reinterpret_cast<std::byte*>(tiers_.device_tally(unit).leaves);
  math_->norm_leaves(layout_.format().gradient, in_set(range), range.count,
                     tiers_.device_tally(unit).leaves, stream);
  device_.copy(reinterpret_cast<std::byte*>(tiers_.host_tally(unit).leaves), leaves,
               range.count / kDeviceLeafElements * sizeof(double), stream);
  device_.notify(stream, [this, unit] {
    scheduler_.post([this, unit] {
      worker_.post([this, unit] { add_leaves(unit); }, [this, unit] { norm_taken(unit); });
    });
  });
}

// On the worker's thread.
void GradientDrain::add_leaves(UnitId unit) {
  NormAccumulator& norm = unit_norms_[index_of(unit)];
  norm = NormAccumulator();
  const std::span leaves(tiers_.host_tally(unit).leaves, owned(unit).count / kDeviceLeafElements);
  for (const double leaf : leaves) norm.add(leaf);
}

// The sums give the leaf, and the device the element, counted from the range's start (a leaf's).
std::optional<std::uint64_t> GradientDrain::first_non_finite_on_device(const Range& range) const {
  const double* const leaves = tiers_.host_tally(range.unit).leaves;
  const std::uint64_t own_begin = owned(range.unit).begin;
  const StateFormat& format = layout_.format();
  for (std::uint64_t at = 0; at < range.count; at += kDeviceLeafElements) {
    if (std::isfinite(leaves[(range.begin + at - own_begin) / kDeviceLeafElements])) continue;
    const Range leaf{range.unit, range.begin + at, kDeviceLeafElements};
    const AlignedBuffer values =
        read_back(device_, in_set(leaf), leaf.count * format.gradient_bytes());
    const auto element = find_non_finite(format.gradient, values.data(), leaf.count);
    return element ? std::optional(at + *element) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace sluice
