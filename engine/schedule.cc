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

Schedule training_schedule(const ModelSpec& model, std::uint32_t micro_batches) {
  Schedule schedule;
  schedule.reserve(micro_batches * (model.forward_order.size() + model.backward_order.size()));
  for (std::uint32_t micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
    for (const UnitId unit : model.forward_order)
      schedule.push_back({.unit = unit, .pass = Pass::kForward});
    for (const UnitId unit : model.backward_order)
      schedule.push_back({.unit = unit, .pass = Pass::kBackward});
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
