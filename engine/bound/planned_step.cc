#include "engine/bound/planned_step.h"

#include "engine/plan/placement.h"

namespace sluice {
namespace {

ActivationPlan activations_of(const ActivationShape& step, const Placement& placement) {
  const std::uint32_t places = placement.activation_window.count;
  return places == 0 ? ActivationPlan{} : plan_activations(step, places);
}

}  // namespace

PlannedStep::PlannedStep(const ActivationShape& step, const Layout& layout,
                         const Placement& placement, std::uint32_t commit_every)
    : layout_(layout),
      placement_(placement),
      schedule_(training_schedule(step.model, step.micro_batches, step.order)),
      window_(plan_window(schedule_, window_unit_bytes(layout, placement), placement.window_bytes,
                          step.model.concurrent_leases)),
      activations_(activations_of(step, placement)),
      commit_every_(commit_every) {}

StepShape PlannedStep::shape(const Rates& rates) const {
  return {layout_, placement_, schedule_, window_, rates, &activations_, commit_every_};
}

}  // namespace sluice
