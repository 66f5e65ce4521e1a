#include "engine/flow/gradient_home.h"

namespace sluice {

GradientRange owned_range(const Layout& layout, UnitId id) {
  const UnitPlace& unit = layout.unit(id);
  return {.unit = id, .begin = unit.shard_begin, .count = unit.shard_elements};
}

std::byte* in_set(const Layout& layout, const Tiers& tiers, const GradientRange& range) {
  return tiers.gradient_set(range.unit) +
         (range.begin - layout.set_begin(range.unit)) * layout.format().gradient_bytes();
}

void copy_to_set(const Layout& layout, const Tiers& tiers, Device& device, const GradientMove& move,
                 StreamId stream) {
  const std::uint64_t element_bytes = layout.format().gradient_bytes();
  device.copy(in_set(layout, tiers, move.range), move.data + move.range.begin * element_bytes,
              move.range.count * element_bytes, stream);
}

}  // namespace sluice
