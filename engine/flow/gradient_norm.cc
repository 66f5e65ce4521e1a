// The end of a gradient's path through the drain: its norm, zeros for units without one, and the
// place of a value that is not finite.
#include <algorithm>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "base/trace/trace.h"
#include "engine/flow/gradient_drain.h"

namespace sluice {

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
    if (!unit.has_gradient) {
      ++units_without_gradient_;
      add_waiting(place.id);
    }
    if (unit.is_whole) continue;
    if (unit.has_gradient || !placement_.gradient_spills(place.id)) {
      start_norm(place.id);
      continue;
    }
    ++unit.jobs;
    jobs_.push_back(
        {.use = {.unit = place.id, .final_gradient = true}, .is_first = true, .has_slot = false});
  }
  pump();
}

void GradientDrain::finish_unit(UnitId unit) {
  units_[index_of(unit)].is_final = true;
  ++final_units_;
  if (norm_of(unit).finite()) on_final_(unit);
}

const NormAccumulator& GradientDrain::norm_of(UnitId unit) const {
  return placement_.gradient_spills(unit) ? spill_.norm(unit) : unit_norms_[index_of(unit)];
}

void GradientDrain::start_norm(UnitId unit) {
  units_[index_of(unit)].is_whole = true;
  if (placement_.gradient_spills(unit)) return finish_unit(unit);  // taken on the way
  ++units_[index_of(unit)].norms;
  ++norms_in_flight_;
  if (placement_.gradient_is_on_device(unit)) {
    if (units_[index_of(unit)].norms == 1) take_norm_on_device(unit);
    return;
  }
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
  --unit.norms;
  if (unit.norms != 0 && placement_.gradient_is_on_device(id)) take_norm_on_device(id);
  if (unit.norms != 0 || !unit.is_whole) return;  // the gradient has changed meanwhile
  finish_unit(id);
}

NormAccumulator GradientDrain::norm() const {
  NormAccumulator norm;
  for (const UnitPlace& unit : layout_.units()) norm.merge(norm_of(unit.id));
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

// Counted from the range's start.
std::optional<std::uint64_t> GradientDrain::first_non_finite(const Range& range) const {
  if (placement_.gradient_is_on_device(range.unit)) return first_non_finite_on_device(range);
  if (!placement_.gradient_spills(range.unit))
    return find_non_finite(layout_.format().gradient, in_set(range), range.count);
  const std::optional<std::uint64_t> element = spill_.first_non_finite(range.unit);
  if (!element || *element < range.begin || *element >= range.begin + range.count)
    return std::nullopt;
  return *element - range.begin;
}

std::string GradientDrain::describe_non_finite() const {
  for (const TensorPlace& tensor : layout_.tensors()) {
    if (layout_.unit(tensor.unit).is_frozen) continue;
    const Range own = owned(tensor.unit);
    const std::uint64_t begin = std::max(tensor.offset_elements, own.begin);
    const std::uint64_t end =
        std::min(tensor.offset_elements + tensor.element_count, own.begin + own.count);
    if (begin >= end) continue;
    const auto index =
        first_non_finite({.unit = tensor.unit, .begin = begin, .count = end - begin});
    if (index)
      return fmt::format("the gradient of \"{}\" (unit \"{}\") is not finite at element {}",
                         tensor.name, layout_.unit(tensor.unit).name,
                         begin - tensor.offset_elements + *index);
  }
  return "a gradient outside every tensor is not finite";
}

}  // namespace sluice
