// Before a run, the planner predicts the needs and the cost of the run. The results are the memory
// of each pool, the bytes per step, and the step's time for each resource and policy. The planner
// also gives these numbers for other homes of the state. The planner is pure, except that it calls
// RunMachine::free_bytes and PlanRequest::run_each.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/bound/bound.h"
#include "engine/planner/run_plan.h"

namespace sluice {

// Calls a function once with each number from 0 to count - 1, and returns when every call has
// returned. The planner has no threads of its own. Its caller may give a runner that makes the
// calls at the same time, such as for_each_at_once().
using PlanRunner =
    std::function<void(std::size_t count, const std::function<void(std::size_t)>& run)>;

// The runner that makes the calls in turn, on the thread of the caller.
void run_in_turn(std::size_t count, const std::function<void(std::size_t)>& run);

struct PlanRequest {
  Config config;
  ModelSpec model;     // the whole model
  RunMachine machine;  // the plan is for rank 0
  // The number of floating-point operations in a forward use of each unit. A backward use takes
  // twice as many operations as a forward use. If activations are recomputed, a backward use takes
  // three times as many operations as a forward use.
  std::vector<double> forward_flops;
  std::uint32_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  // If there are measured unit times, these times replace `forward_flops` and `flops`.
  Rates rates;
  double flops = 0;
  PlanRunner run_each = run_in_turn;  // the result does not depend on the runner
};

// Returns the first line of the text of an obstacle. This line is short enough for a row of a
// table.
std::string in_short(const std::string& obstacle);

// Does the same as plan_run(), except in two cases: the plan does not fit, or the homes are
// impossible with several ranks. In these two cases, the call does not throw. The result is then
// empty, and `obstacle` is set to the message.
std::optional<RunPlan> try_plan(const Config& config, const ModelSpec& model, const Layout& layout,
                                const RunMachine& machine, std::string& obstacle);

// The config's own placement after a change of one setting that moves no home.
struct PlannedChange {
  OverlapPolicy policy{};
  Placement placement;  // the homes are the config's, but the buffers are of the changed config
  StepCost step;
};

// One way to place the state.
struct PlannedPlacement {
  std::string name;
  Config::Placement choices;
  std::string obstacle;  // why the placement is impossible; the members below are unset then
  Placement placement;
  OverlapPolicy policy{};  // the config's policy, resolved
  RankTraffic rank_traffic;
  StepCost step;  // under `policy`
  double compute_s = 0;
  // Only the config's own placement has values in the members below.
  //
  // Each policy for which the budgets have room, as if the config named this policy.
  std::vector<PlannedChange> policies;
  StepCost least;  // T_min
  // The other choice of optimizer.update_on. The value exists only if the device has its own memory
  // and the placement fits.
  std::optional<PlannedChange> on_other_processor;
};

// Returns the config's own placement first.
// The other placements follow in this order:
// - gpu: everything is on the device, and is updated there.
// - device: the parameters are on the device, and the optimizer is in host memory.
// - host: everything is in host memory.
// - nvme: everything is on storage.
// - mixed: the planner chooses the homes within the budgets.
// If a placement is impossible with several ranks, the `obstacle` of this placement says why.
// Fails with kConfig if the config's own placement is impossible with several ranks.
std::vector<PlannedPlacement> plan_alternatives(const PlanRequest& request);

}  // namespace sluice
