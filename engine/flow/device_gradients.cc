#include "engine/flow/device_gradients.h"

#include <cmath>
#include <span>
#include <utility>

#include "cpu_optim/gradient_ops.h"
#include "engine/flow/counted_norm.h"

namespace sluice {

static_assert(kNormLeafElements == kAlignElements, "a unit is made of whole leaves");

DeviceGradients::DeviceGradients(const FlowParts& parts, const ResidentUnits& residents,
                                 DeviceMath* math, Callbacks callbacks)
    : GradientHome(std::move(callbacks)),
      layout_(parts.layout),
      counted_(parts.counted),
      tiers_(parts.tiers),
      device_(parts.device),
      scheduler_(parts.scheduler),
      worker_(parts.worker),
      residents_(residents),
      math_(math),
      norms_(parts.layout.units().size()) {}

// The update before has read the sum in the set: computation waited for it.
void DeviceGradients::start(const GradientMove& move, StreamId stream) {
  const StateFormat& format = layout_.format();
  if (move.is_first) {
    copy_to_set(layout_, tiers_, device_, move, stream);
  } else {
    math_->accumulate(format.gradient, in_set(layout_, tiers_, move.range),
                      move.data + move.range.begin * format.gradient_bytes(), move.range.count,
                      stream);
  }
  device_.notify(stream, [this] { scheduler_.post([this] { arrived(); }); });
}

void DeviceGradients::arrived() {
  callbacks_.on_left();
  callbacks_.on_home();
}

void DeviceGradients::take_norm(const GradientSum& sum, StreamId stream) {
  const UnitId unit = sum.unit;
  if (!sum.has_gradient) {
    device_.wait(stream, residents_.updated_event(unit));
    device_.fill_zero(tiers_.gradient_set(unit), layout_.set_gradient_bytes(unit), stream);
  }
  const GradientRange own = owned_range(layout_, unit);
  const std::byte* const leaves = reinterpret_cast<std::byte*>(tiers_.device_tally(unit).leaves);
  math_->norm_leaves(layout_.format().gradient, in_set(layout_, tiers_, own), own.count,
                     tiers_.device_tally(unit).leaves, stream);
  device_.copy(reinterpret_cast<std::byte*>(tiers_.host_tally(unit).leaves), leaves,
               own.count / kNormLeafElements * sizeof(double), stream);
  device_.notify(stream, [this, unit] { scheduler_.post([this, unit] { leaves_arrived(unit); }); });
}

void DeviceGradients::leaves_arrived(UnitId unit) {
  worker_.post([this, unit] { add_leaves(unit); }, [this, unit] { callbacks_.on_norm(unit); });
}

// On the worker's thread.
void DeviceGradients::add_leaves(UnitId unit) {
  const GradientRange own = owned_range(layout_, unit);
  const double* const leaves = tiers_.host_tally(unit).leaves;
  norms_[index_of(unit)] =
      counted_norm(layout_, counted_, unit, own.begin, own.count,
                   [&](std::uint64_t begin, std::uint64_t count, NormAccumulator& norm) {
                     for (std::uint64_t at = begin; at < begin + count; at += kNormLeafElements)
                       norm.add(leaves[(at - own.begin) / kNormLeafElements]);
                   });
}

// The sums give the leaf, and the device the element. The range begins with a leaf.
std::optional<std::uint64_t> DeviceGradients::first_non_finite(const GradientRange& range) const {
  const double* const leaves = tiers_.host_tally(range.unit).leaves;
  const std::uint64_t own_begin = owned_range(layout_, range.unit).begin;
  const StateFormat& format = layout_.format();
  for (std::uint64_t at = 0; at < range.count; at += kNormLeafElements) {
    if (std::isfinite(leaves[(range.begin + at - own_begin) / kNormLeafElements])) continue;
    const GradientRange leaf{range.unit, range.begin + at, kNormLeafElements};
    const AlignedBuffer values =
        read_back(device_, in_set(layout_, tiers_, leaf), leaf.count * format.gradient_bytes());
    const auto element = find_non_finite(format.gradient, values.data(), leaf.count);
    return element ? std::optional(at + *element) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace sluice
