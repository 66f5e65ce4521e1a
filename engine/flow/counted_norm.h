// Computes the norm of a part of a unit's gradient. The norm leaves out each tensor that another
// member of the norm group counts (sluice/norm_group.h). The function is pure, and any thread may
// call it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/norm_accumulator.h"
#include "engine/plan/layout.h"

namespace sluice {

// The tensors whose gradients count in this rank's norm. The object changes only between steps, so
// any thread can read it during a step.
struct CountedTensors {
  std::vector<bool> is_elsewhere = {};  // by tensor; if empty, all tensors count here

  bool count_here(TensorId tensor) const {
    return is_elsewhere.empty() || !is_elsewhere[index_of(tensor)];
  }
};

// The norm of elements [begin, begin + count) of the unit. `add(first, count, norm)` must add the
// squares of the unit's elements [first, first + count) to `norm`. The range [first, first + count)
// consists of whole leaves. The result is not finite if any element in [begin, begin + count) is
// not finite, even in a tensor that another member counts. The other member's copy of the tensor
// may differ, so the other member cannot detect every such value.
template <class Add>
NormAccumulator counted_norm(const Layout& layout, const CountedTensors& counted, UnitId unit,
                             std::uint64_t begin, std::uint64_t count, const Add& add) {
  NormAccumulator own, elsewhere;
  const auto tensors = layout.tensors_of(unit);
  const std::uint64_t end = begin + count;
  for (std::size_t i = 0; i < tensors.size() && begin < end;) {
    const bool is_here = counted.count_here(tensors[i].id);
    while (i < tensors.size() && counted.count_here(tensors[i].id) == is_here) ++i;
    // Padding belongs to the tensor before the padding.
    const std::uint64_t part_end =
        i == tensors.size() ? end : std::min(end, tensors[i].offset_elements);
    if (part_end <= begin) continue;
    add(begin, part_end - begin, is_here ? own : elsewhere);
    begin = part_end;
  }
  if (!elsewhere.finite()) own.add(std::numeric_limits<double>::infinity());
  return own;
}

}  // namespace sluice
