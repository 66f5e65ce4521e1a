// Answers, before a run, what it will need and cost: memory by pool, bytes a step, the step's time
// by resource and policy, and the same for other places of the state. Pure: asks no machine.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/bound/bound.h"

namespace sluice {

struct PlanRequest {
  Config config;            // memory budgets given
  ModelSpec model;          // the whole one
  std::uint32_t ranks = 1;  // of which this is rank 0
  // Floating-point operations of a unit's forward use, by unit; backward takes twice as many, and
  // as many again where it recomputes activations.
  std::vector<double> forward_flops;
  std::uint32_t micro_batches = 1;
  MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  bool fills_device = false;  // as PassNeeds has it: the device is a GPU
  Rates rates;                // without unit times
  double flops = 0;
};

// The first line of why something cannot be, for a row of a table.
std::string in_short(const std::string& obstacle);

// Where the state is placed, without what a step costs.
struct PlannedMemory {
  std::string obstacle;  // why it cannot be; then nothing below holds
  Placement placement;
  OverlapPolicy policy{};  // what the config comes to
};
// By `choices` instead of the config's. `model`, validated, and `layout` are the request's.
PlannedMemory plan_memory(const PlanRequest& request, const ModelSpec& model, const Layout& layout,
                          const Config::Placement& choices);

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
