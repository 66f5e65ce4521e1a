// The state that each ZeRO stage leaves on one of several ranks, for `sluice plan --stages`. The
// function computes the bytes at rest by kind, and the peak use in each phase of a step. The homes
// are as in the config, if the stage offers these homes. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "engine/plan/pool_meter.h"
#include "engine/planner/planner.h"

namespace sluice {

// The bytes of one rank. `window_bytes` are the parameters that stage 3 gathers on the device.
// These parameters are for the leases and for two units ahead. `parameter_bytes` include the
// parameters that stage 3 keeps gathered.
struct StageMemory {
  // The bytes at rest, on any tier.
  std::uint64_t parameter_bytes = 0;
  std::uint64_t window_bytes = 0;
  std::uint64_t gradient_bytes = 0;
  std::uint64_t optimizer_bytes = 0;
  // The homes that the config names, but that the stage does not offer. "auto" replaces them.
  std::string left_to_auto;  // such as "parameters"; empty = none
  std::string obstacle;      // why the budgets are too small; then the fields below mean nothing
  PhaseMarks most_in_use{};
};

// Returns one entry for each stage. The index is the stage's number.
std::array<StageMemory, 4> memory_by_stage(const PlanRequest& request);
std::string stage_table(const PlanRequest& request);

}  // namespace sluice
