// The mean cost of a simulated step, over a number of steps behind those that fill the pipeline.
// Once a state returns, all steps repeat themselves, so the rest of them need not be simulated.
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

  // Notes the cost of all steps so far at the end of one more step. Returns the mean once it is
  // known, after all steps at the latest. `state` is that of the simulation, and is empty if the
  // state is not known in full. The mean is the same with and without states.
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
