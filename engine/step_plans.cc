#include "engine/step_plans.h"

namespace sluice {

StepPlans::StepPlans(const ModelSpec& model, const Layout& layout, const Placement& placement)
    : model_(model),
      layout_(layout),
      placement_(placement),
      window_unit_bytes_(sluice::window_unit_bytes(layout, placement)),
      inference_(plan(inference_schedule(model))) {
  training(1, MicroBatchOrder::kHorizontal);
}

StepPlan StepPlans::plan(Schedule schedule) const {
  WindowPlan window =
      plan_window(schedule, window_unit_bytes_, placement_.window_bytes, model_.concurrent_leases);
  return {.schedule = std::move(schedule), .window = std::move(window)};
}

const StepPlan& StepPlans::training(std::uint32_t micro_batches, MicroBatchOrder order) {
  if (micro_batches == 1) order = MicroBatchOrder::kHorizontal;  // they are the same
  const std::pair key(micro_batches, order);
  const auto known = training_.find(key);
  if (known != training_.end()) return known->second;
  return training_.emplace(key, plan(training_schedule(model_, micro_batches, order)))
      .first->second;
}

Traffic StepPlans::predict_traffic(std::uint32_t micro_batches, MicroBatchOrder order) {
  const StepPlan& plan = training(micro_batches, order);
  return predict_step_traffic(layout_, placement_, plan.schedule, plan.window);
}

}  // namespace sluice
