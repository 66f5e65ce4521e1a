#include "engine/bound.h"

#include <algorithm>

#include "engine/bound_simulation.h"

namespace sluice {

StepCost bound_step(const StepShape& shape, OverlapPolicy policy) {
  return simulate_steps(shape, policy);
}

StepCost minimum_step(const StepShape& shape) {
  StepCost least;
  for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kEager}) {
    StepCost cost = simulate_steps(shape, policy);
    cost.step_s = std::ranges::max(cost.busy_s);
    if (policy == OverlapPolicy::kDeferred || cost.step_s < least.step_s) least = cost;
  }
  return least;
}

}  // namespace sluice
