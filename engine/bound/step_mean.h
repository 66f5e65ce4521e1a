// Computes the mean cost of a simulated step. The first steps, which fill the pipeline, do not
// count. When a state occurs again, all later steps repeat earlier steps, so the later steps need
// not be simulated.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/bound/simulated_state.h"
#include "engine/bound/step_cost.h"

namespace sluice {

class StepMean {
 public:
  StepMean(std::uint64_t warm_steps, std::uint64_t counted_steps)
      : warm_steps_(warm_steps), counted_steps_(counted_steps) {}

  // Called at the end of each step. `cost` is the cost of all steps so far. Returns the mean as
  // soon as the mean is known, at the latest after all steps. `state` is the state of the
  // simulation, or empty if the state is not completely known. The states do not change the mean.
  std::optional<StepCost> note(const StepCost& cost, const std::optional<SimulatedState>& state);

 private:
  struct Begun {
    std::optional<SimulatedState> state;
    StepCost cost;
  };

  const std::uint64_t warm_steps_;
  const std::uint64_t counted_steps_;
  std::vector<Begun> begun_;  // at the end of each step
};

}  // namespace sluice
