// The input for the tests of the bounds. The input is a model of equal blocks, the placement of the
// model, and the machine's rates.
#pragma once

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "engine/bound/bound.h"

namespace sluice::test {

inline constexpr std::uint64_t kBlockElements = 4096;
inline constexpr std::uint64_t kParameterBytes = 2 * kBlockElements;
inline constexpr std::uint64_t kRecordBytes = 10 * kBlockElements;

// A bf16 model of equal blocks, with all data that the bounds need. The object must not move,
// because StepShape refers to the object's fields.
struct BoundModel {
  // The first `frozen_units` units are frozen.
  explicit BoundModel(const std::vector<int>& unit_blocks, std::uint64_t window_units = 0,
                      std::size_t frozen_units = 0)
      : spec(validated(spec_of(unit_blocks, frozen_units))),
        layout(spec, {}, kBlockElements),
        schedule(training_schedule(spec, 1)) {
    const auto count = static_cast<std::uint64_t>(layout.blocks().size());
    placement.parameter_tier.assign(count, Tier::kNvme);
    placement.record_tier.assign(count, Tier::kNvme);
    placement.gradient_tier.assign(unit_blocks.size(), Tier::kHost);
    placement.lanes.count = 3;
    set_prefetch_slots(8);
    placement.gradient_slots.count = 2;
    placement.nvme_parameter_bytes = count * kParameterBytes;
    placement.nvme_record_bytes = count * kRecordBytes;
    rates.units.assign(unit_blocks.size(), {});
    const auto largest = static_cast<std::uint64_t>(std::ranges::max(unit_blocks));
    placement.window_bytes = std::max<std::uint64_t>(window_units, 2) * largest * kParameterBytes;
    window = plan_window(schedule, window_unit_bytes(layout, placement), placement.window_bytes, 1);
  }
  BoundModel(const BoundModel&) = delete;

  static ModelSpec spec_of(const std::vector<int>& unit_blocks, std::size_t frozen_units = 0) {
    ModelSpec spec;
    for (std::size_t i = 0; i < unit_blocks.size(); ++i)
      spec.units.push_back(
          {.name = fmt::format("u{}", i),
           .tensors = {{.name = fmt::format("t{}", i),
                        .shape = {static_cast<std::uint64_t>(unit_blocks[i]) * kBlockElements}}},
           .is_frozen = i < frozen_units});
    return spec;
  }

  void set_compute(double forward_s, double backward_s) {
    rates.units.assign(layout.units().size(), {.forward_s = forward_s, .backward_s = backward_s});
  }
  void set_tiers(Tier parameters, Tier records) {
    std::ranges::fill(placement.parameter_tier, parameters);
    std::ranges::fill(placement.record_tier, records);
  }
  void set_prefetch_slots(std::uint32_t count) {
    placement.parameter_slots.count = count + placement.lanes.count;
  }
  StepShape shape() const { return {layout, placement, schedule, window, rates}; }
  double step_s(OverlapPolicy policy) const { return bound_step(shape(), policy).step_s; }

  ModelSpec spec;
  Layout layout;
  Schedule schedule;
  Placement placement;
  WindowPlan window;
  Rates rates;
};

}  // namespace sluice::test
