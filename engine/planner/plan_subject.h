// A request in the planner's terms: the layout and the schedule, the homes of the state, and the
// cost of a step with these homes. Constant after construction; callable from any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "engine/bound/merged_blocks.h"
#include "engine/planner/planner.h"

namespace sluice {

// The grain of a simulation that gives a first guess of a step with many blocks. The time of most
// steps is then off by less than 0.1 % (docs/results/plans.md).
inline constexpr std::uint64_t kBlocksOfAGlance = 2 << 10;

class Planning {
 public:
  // `request` must outlive the object.
  explicit Planning(const PlanRequest& request);

  const Layout& layout() const { return layout_; }
  const ModelSpec& model() const { return model_; }  // validated

  // The rates for a step that has `compute_factor` times the request's computation.
  Rates rates(double compute_factor = 1) const;
  double compute_s(const Rates& rates) const;  // per step

  // The call plans a placement, without the step's cost. If the placement is impossible, the result
  // names the obstacle.
  PlannedPlacement place(const std::string& name, const Config::Placement& choices) const;
  // The call plans the config's own choices under another policy. The policy may need other
  // buffers.
  PlannedPlacement place_under(OverlapPolicy policy) const;
  // `blocks_max` is the grain of the simulation, as for bound_of_blocks().
  StepCost step_of(const Placement& placement, OverlapPolicy policy, const Rates& rates,
                   std::uint64_t blocks_max = kBlocksSimulatedMax) const;

 private:
  PlannedPlacement place(const std::string& name, const Config::Placement& choices,
                         Config config) const;
  ActivationShape shape() const;
  RankTraffic rank_traffic(const Placement& placement) const;

  const PlanRequest& request_;
  ModelSpec model_;
  Layout layout_;
  Schedule schedule_;
};

// Calls `run` with 0 .. count - 1, on as many threads as there are cores. Simulated schedules are
// independent of each other.
void for_each_at_once(std::size_t count, const std::function<void(std::size_t)>& run);

}  // namespace sluice
