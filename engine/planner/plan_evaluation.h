// This class evaluates a request to the planner. The class has the layout and the schedule, finds
// the homes of the state, and computes the cost of a step with these homes. The object is constant
// after construction, and any thread may use it.
#pragma once

#include <cstdint>
#include <string>

#include "engine/bound/merged_blocks.h"
#include "engine/planner/planner.h"

namespace sluice {

// A simulation for a first guess has at most this number of blocks. For most steps, the guessed
// time is wrong by less than 0.1 % (docs/results/plans.md).
inline constexpr std::uint64_t kBlocksOfAGlance = 2 << 10;

class PlanEvaluation {
 public:
  // `request` must outlive the object.
  explicit PlanEvaluation(const PlanRequest& request);

  const Layout& layout() const { return layout_; }
  const ModelSpec& model() const { return model_; }  // validated

  // The rates for a step that has `compute_factor` times as much computation as the request.
  Rates rates(double compute_factor = 1) const;
  double compute_s(const Rates& rates) const;  // per step

  // Returns the planned placement, without the cost of a step. If the placement is impossible, the
  // result names the obstacle.
  PlannedPlacement place(const std::string& name, const Config::Placement& choices) const;
  // Returns the plan for the config's own placement under the policy `policy`. Another policy may
  // need other buffers.
  PlannedPlacement place_under(OverlapPolicy policy) const;
  // Returns the plan for the config's own placement, with the updates on `processor`.
  PlannedPlacement place_on(UpdateProcessor processor) const;
  // `blocks_max` is the largest number of blocks in the simulation. bound_of_blocks() uses
  // `blocks_max` with the same meaning.
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

}  // namespace sluice
