#include "engine/schedule.h"

namespace sluice {

std::string_view name_of(Pass pass) {
  switch (pass) {
    case Pass::kForward: return "forward";
    case Pass::kBackward: return "backward";
    case Pass::kInference: return "inference";
  }
  return "unknown";
}

Schedule training_schedule(const ModelSpec& model, std::uint32_t micro_batches,
                           MicroBatchOrder order) {
  Schedule schedule;
  schedule.reserve(micro_batches * (model.forward_order.size() + model.backward_order.size()));
  const auto add = [&](const std::vector<UnitId>& units, Pass pass, std::uint32_t repeats) {
    for (const UnitId unit : units)
      schedule.insert(schedule.end(), repeats, {.unit = unit, .pass = pass});
  };
  const bool is_vertical = order == MicroBatchOrder::kVertical;
  for (std::uint32_t round = 0; round < (is_vertical ? 1 : micro_batches); ++round) {
    add(model.forward_order, Pass::kForward, is_vertical ? micro_batches : 1);
    add(model.backward_order, Pass::kBackward, is_vertical ? micro_batches : 1);
  }
  std::vector<bool> seen(model.units.size(), false);
  for (ScheduledUse& use : schedule) {
    if (use.pass != Pass::kBackward) continue;
    use.first_gradient = !seen[index_of(use.unit)];
    seen[index_of(use.unit)] = true;
  }
  seen.assign(model.units.size(), false);
  for (auto use = schedule.rbegin(); use != schedule.rend(); ++use) {
    if (use->pass != Pass::kBackward) continue;
    use->final_gradient = !seen[index_of(use->unit)];
    seen[index_of(use->unit)] = true;
  }
  return schedule;
}

Schedule inference_schedule(const ModelSpec& model) {
  Schedule schedule;
  for (const UnitId unit : model.forward_order)
    schedule.push_back({.unit = unit, .pass = Pass::kInference});
  return schedule;
}

}  // namespace sluice
