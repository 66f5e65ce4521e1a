#include "engine/flow/gradient_zeros.h"

#include <algorithm>
#include <cstring>

#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/store/tiers.h"

namespace sluice {

GradientZeros::GradientZeros(const FlowParts& parts)
    : layout_(parts.layout),
      tiers_(parts.tiers),
      device_(parts.device),
      overwrites_(parts.model.overwrites_gradients),
      marks_(overwrites_ && parts.guard != nullptr),
      last_units_(parts.placement.gradient_slots.count),
      set_event_(parts.device),
      stream_(parts.device, "gradient zeros", StreamPriority::kHigh) {
  for (std::uint32_t slot = 0; slot < parts.placement.gradient_slots.count; ++slot)
    slot_events_.emplace_back(parts.device);
}

void GradientZeros::fill(std::byte* target, std::uint64_t size_bytes) {
  device_.fill_zero(target, size_bytes, stream_.id());
  if (!device_.has_own_memory()) filled_bytes_ += size_bytes;
}

// At once, so that computation finds the slot ready. The rest of the slot is still zero.
void GradientZeros::left(std::uint32_t slot, UnitId unit) {
  if (overwrites_) return;
  fill(tiers_.gradient_slot(slot), layout_.unit_gradient_bytes(unit));
  device_.record(slot_events_[slot].id(), stream_.id());
}

void GradientZeros::taken(std::uint32_t slot, UnitId unit) {
  if (!overwrites_) return;
  std::optional<UnitId>& last = last_units_[slot];
  if (last && !have_same_padding(*last, unit)) {
    fill_padding(tiers_.gradient_slot(slot), unit);
    device_.record(slot_events_[slot].id(), stream_.id());
  }
  last = unit;
  mark(tiers_.gradient_slot(slot), unit);
}

void GradientZeros::lent(UnitId unit) {
  if (overwrites_) return mark(tiers_.gradient_set(unit), unit);
  fill(tiers_.gradient_set(unit), layout_.set_gradient_bytes(unit));
  device_.record(set_event_.id(), stream_.id());
}

bool GradientZeros::have_same_padding(UnitId a, UnitId b) const {
  return layout_.unit(a).element_count == layout_.unit(b).element_count &&
         std::ranges::equal(layout_.tensors_of(a), layout_.tensors_of(b),
                            [](const TensorPlace& one, const TensorPlace& other) {
                              return one.offset_elements == other.offset_elements &&
                                     one.element_count == other.element_count;
                            });
}

// Between the tensors, and behind the last one.
void GradientZeros::fill_padding(std::byte* gradient, UnitId unit) {
  const std::uint64_t element_bytes = layout_.format().gradient_bytes();
  const auto tensors = layout_.tensors_of(unit);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint64_t begin = tensors[i].offset_elements + tensors[i].element_count;
    const std::uint64_t end =
        i + 1 < tensors.size() ? tensors[i + 1].offset_elements : layout_.unit(unit).element_count;
    if (begin < end) fill(gradient + begin * element_bytes, (end - begin) * element_bytes);
  }
}

// A guard means that the host can write the memory, which nothing else uses now. Every format has a
// NaN whose bits are all ones.
void GradientZeros::mark(std::byte* gradient, UnitId unit) const {
  if (!marks_) return;
  const std::uint64_t element_bytes = layout_.format().gradient_bytes();
  for (const TensorPlace& tensor : layout_.tensors_of(unit))
    std::memset(gradient + tensor.offset_elements * element_bytes, 0xff,
                tensor.element_count * element_bytes);
}

}  // namespace sluice
