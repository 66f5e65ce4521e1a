// Computes the memory that one of several ranks needs under each ZeRO stage, for `sluice plan
// --stages`. The functions compute the bytes of each kind of state between steps, and the peak use
// in each phase of a step. Each kind of state has the place that the config chooses, if the stage
// permits this place. The functions are pure.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "engine/plan/pool_meter.h"
#include "engine/planner/planner.h"

namespace sluice {

// The bytes of one rank. `window_bytes` is the device memory for gathered parameters. Stage 3
// gathers the parameters of the leased units and of the next two units. `parameter_bytes` includes
// the parameters that stage 3 keeps gathered.
struct StageMemory {
  // The bytes that each kind of state occupies between steps, on all tiers together.
  std::uint64_t parameter_bytes = 0;
  std::uint64_t window_bytes = 0;
  std::uint64_t gradient_bytes = 0;
  std::uint64_t optimizer_bytes = 0;
  // The stage forbids the place that the config chooses for these kinds of state. "auto" replaces
  // the config's choice.
  std::string left_to_auto;  // such as "parameters"; empty = none
  std::string obstacle;      // why the budgets are too small; the field below is then unset
  PhaseMarks most_in_use{};
};

// Returns one entry for each stage. The entry's index is the number of the stage.
std::array<StageMemory, 4> memory_by_stage(const PlanRequest& request);
std::string stage_table(const PlanRequest& request);

}  // namespace sluice
