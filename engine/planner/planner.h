// Answers, before a run, what it will need and cost: memory by pool, bytes a step, the step's time
// by resource and policy, and the same for other places of the state. Pure: asks no machine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/bound/bound.h"
#include "engine/planner/run_plan.h"

namespace sluice {

struct PlanRequest {
  Config config;
  ModelSpec model;     // the whole one
  RunMachine machine;  // the plan is that of its rank 0
  // Floating-point operations of a unit's forward use, by unit; backward takes twice as many, and
  // as many again where it recomputes activations.
  std::vector<double> forward_flops;
  std::uint32_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  Rates rates;  // without unit times
  double flops = 0;
};

// The first line of why something cannot be, for a row of a table.
std::string in_short(const std::string& obstacle);

// plan_run(), with the message of what does not fit, or of a home that several ranks cannot have,
// in `obstacle` instead of an error.
std::optional<RunPlan> try_plan(const Config& config, const ModelSpec& model, const Layout& layout,
                                const RunMachine& machine, std::string& obstacle);

// One way to place the state.
struct PlannedPlacement {
  std::string name;
  std::string obstacle;  // why it cannot be; then nothing below holds
  Placement placement;
  OverlapPolicy policy{};  // what the config comes to
  StepCost step;           // under it
  double compute_s = 0;
  // Of the config's own placement alone:
  std::vector<std::pair<OverlapPolicy, StepCost>> policies;
  StepCost least;  // T_min
};

// The config's own placement, then: gpu (all there, which updates it), device (parameters there,
// optimizer in host memory), host, nvme, mixed (as budgets allow). Where several ranks cannot have
// one, it has an obstacle.
// Fails with: kConfig for a config whose own placement they cannot have.
std::vector<PlannedPlacement> plan_alternatives(const PlanRequest& request);

}  // namespace sluice
