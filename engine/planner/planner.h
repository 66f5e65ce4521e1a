// The planner says before a run what the run will need and cost. The planner gives the memory by
// pool, the bytes per step, and the step's time by resource and policy. The planner also gives
// these numbers for other homes of the state. The planner is pure, and asks no machine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/bound/bound.h"
#include "engine/planner/run_plan.h"

namespace sluice {

struct PlanRequest {
  Config config;
  ModelSpec model;     // the whole model
  RunMachine machine;  // the plan is that of its rank 0
  // For each unit, the floating-point operations of a forward use. Backward takes twice as many
  // operations as forward. If backward recomputes activations, backward takes three times as many
  // operations as forward.
  std::vector<double> forward_flops;
  std::uint32_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  // If there are measured unit times, these replace `forward_flops` and `flops`.
  Rates rates;
  double flops = 0;
};

// The first line of an obstacle, short enough for a row of a table.
std::string in_short(const std::string& obstacle);

// Does the same as plan_run(), but returns nothing if the plan does not fit, or if several ranks
// cannot have such homes. The call then sets `obstacle` to the message.
std::optional<RunPlan> try_plan(const Config& config, const ModelSpec& model, const Layout& layout,
                                const RunMachine& machine, std::string& obstacle);

// One way to place the state.
struct PlannedPlacement {
  std::string name;
  Config::Placement choices;
  std::string obstacle;  // why the placement is impossible; the members below are unset then
  Placement placement;
  OverlapPolicy policy{};  // the config's policy, resolved
  RankTraffic rank_traffic;
  StepCost step;  // under that policy
  double compute_s = 0;
  // The members below are for the config's own placement only.
  //
  // The cost of a step under each policy. Each policy is planned as if the config named it, because
  // the buffers depend on the policy.
  std::vector<std::pair<OverlapPolicy, StepCost>> policies;
  StepCost least;  // T_min
};

// Returns the config's own placement first.
// The other placements follow in this order:
// - gpu: everything is on the device and updated there.
// - device: the parameters are on the device, and the optimizer is in host memory.
// - host and nvme: everything is in that tier.
// - mixed: the homes are as the budgets allow.
// A placement that several ranks cannot have gets an obstacle.
// Fails with kConfig if several ranks cannot have the config's own placement.
std::vector<PlannedPlacement> plan_alternatives(const PlanRequest& request);

}  // namespace sluice
