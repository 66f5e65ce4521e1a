// The state that each ZeRO stage leaves on one of several ranks, as `sluice plan --stages` shows
// it: by kind at rest, and the most in use in each phase of a step, with the homes that the config
// chooses and the stage has. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "engine/plan/pool_meter.h"
#include "engine/planner/planner.h"

namespace sluice {

// Bytes of one rank. `window` has the parameters that stage 3 brings together on the device, for
// the leases and two units ahead. Parameters include all those that stage 3 keeps gathered.
struct StageMemory {
  // At rest, wherever.
  std::uint64_t parameter_bytes = 0;
  std::uint64_t window_bytes = 0;
  std::uint64_t gradient_bytes = 0;
  std::uint64_t optimizer_bytes = 0;
  // Homes that the config names and the stage does not have: "auto" takes their place.
  std::string left_to_auto;  // such as "parameters"; empty, none
  std::string obstacle;      // why the budgets do not hold it; then nothing below holds
  PhaseMarks most_in_use{};
};

// By stage.
std::array<StageMemory, 4> memory_by_stage(const PlanRequest& request);
std::string stage_table(const PlanRequest& request);

}  // namespace sluice
