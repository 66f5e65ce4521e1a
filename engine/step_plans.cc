#include "engine/step_plans.h"

#include <fmt/format.h>

#include "base/error.h"

namespace sluice {

StepPlans::StepPlans(const ModelSpec& model, const Layout& layout, const Placement& placement)
    : model_(model),
      layout_(layout),
      placement_(placement),
      window_unit_bytes_(sluice::window_unit_bytes(layout, placement)),
      inference_(plan(inference_schedule(model), {.model = model, .has_backward = false})) {
  training(1, MicroBatchOrder::kHorizontal);
}

StepPlan StepPlans::plan(Schedule schedule, const ActivationShape& activations) const {
  StepPlan plan;
  plan.window =
      plan_window(schedule, window_unit_bytes_, placement_.window_bytes, model_.concurrent_leases);
  plan.schedule = std::move(schedule);
  if (placement_.activation_window.count != 0)
    plan.activations = plan_activations(activations, placement_.activation_window.count);
  const bool has_homes =
      placement_.host_activation_bytes != 0 || placement_.nvme_activation_bytes != 0;
  const bool fits =
      has_homes ? placement_.activation_homes.hold(activations.micro_batches, activations.order)
                : plan.activations.stored_bytes == 0;
  if (!fits)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("a {} step of {} micro-batches has more activations than the pools "
                            "hold; Config::activations has to name the largest step",
                            name_of(activations.order), activations.micro_batches));
  return plan;
}

const StepPlan& StepPlans::training(std::uint32_t micro_batches, MicroBatchOrder order) {
  if (micro_batches == 1) order = MicroBatchOrder::kHorizontal;  // they are the same
  const std::pair key(micro_batches, order);
  const auto known = training_.find(key);
  if (known != training_.end()) return known->second;
  return training_
      .emplace(key, plan(training_schedule(model_, micro_batches, order),
                         {.model = model_, .micro_batches = micro_batches, .order = order}))
      .first->second;
}

Traffic StepPlans::predict_traffic(std::uint32_t micro_batches, MicroBatchOrder order) {
  const StepPlan& plan = training(micro_batches, order);
  return predict_step_traffic(layout_, placement_, plan.schedule, plan.window, plan.activations);
}

}  // namespace sluice
