// A training step under a placement: its schedule, its window and its activations, in the form that
// engine/bound/bound.h takes. Constant after construction, callable from any thread.
#pragma once

#include <cstdint>

#include "engine/bound/step_cost.h"
#include "engine/plan/activation_plan.h"
#include "engine/plan/schedule.h"
#include "engine/plan/window_plan.h"

namespace sluice {

class PlannedStep {
 public:
  // `layout` and `placement` must outlive the object. `commit_every` is the config's
  // storage.state.commit_every.
  PlannedStep(const ActivationShape& step, const Layout& layout, const Placement& placement,
              std::uint32_t commit_every);

  // The object and `rates` must outlive the result.
  StepShape shape(const Rates& rates) const;

 private:
  const Layout& layout_;
  const Placement& placement_;
  const Schedule schedule_;
  const WindowPlan window_;
  const ActivationPlan activations_;  // empty where the application keeps them
  const std::uint32_t commit_every_;
};

}  // namespace sluice
