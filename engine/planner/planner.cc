#include "engine/planner/planner.h"

#include <algorithm>
#include <array>
#include <utility>

#include <sluice/error.h>
#include "engine/plan/sharding.h"
#include "engine/planner/plan_evaluation.h"

namespace sluice {
namespace {

// The steps of placements under policies; each is simulated only once.
class StepCosts {
 public:
  StepCosts(const PlanEvaluation& evaluation, const PlanRunner& run_each)
      : evaluation_(evaluation), run_each_(run_each), rates_(evaluation.rates()) {}

  // `placement` must stay in place.
  void want(const Placement& placement, OverlapPolicy policy) {
    if (find(placement, policy) == wanted_.end()) wanted_.push_back({&placement, policy, {}});
  }
  void simulate() {
    run_each_(wanted_.size(), [this](std::size_t i) {
      wanted_[i].cost = evaluation_.step_of(*wanted_[i].placement, wanted_[i].policy, rates_);
    });
  }
  const StepCost& of(const Placement& placement, OverlapPolicy policy) {
    return find(placement, policy)->cost;
  }

 private:
  struct Wanted {
    const Placement* placement = nullptr;
    OverlapPolicy policy{};
    StepCost cost;
  };
  std::vector<Wanted>::iterator find(const Placement& placement, OverlapPolicy policy) {
    return std::ranges::find_if(wanted_, [&](const Wanted& wanted) {
      return wanted.policy == policy && *wanted.placement == placement;
    });
  }

  const PlanEvaluation& evaluation_;
  const PlanRunner& run_each_;
  const Rates rates_;
  std::vector<Wanted> wanted_;
};

constexpr std::array kPolicies = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                  OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

}  // namespace

void run_in_turn(std::size_t count, const std::function<void(std::size_t)>& run) {
  for (std::size_t i = 0; i < count; ++i) run(i);
}

std::string in_short(const std::string& obstacle) {
  std::string line = obstacle.substr(0, obstacle.find('\n'));
  if (line.ends_with(':')) line.pop_back();  // the list of pools followed
  return line;
}

std::optional<RunPlan> try_plan(const Config& config, const ModelSpec& model, const Layout& layout,
                                const RunMachine& machine, std::string& obstacle) {
  try {
    return plan_run(config, model, layout, machine);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kOutOfMemory && error.code() != ErrorCode::kConfig) throw;
    obstacle = error.what();
    return std::nullopt;
  }
}

std::vector<PlannedPlacement> plan_alternatives(const PlanRequest& request) {
  check_homes(request.config.sharding, request.machine.ranks, request.config.placement);
  const PlanEvaluation evaluation(request);
  const std::array<std::pair<const char*, Config::Placement>, 6> choices{
      {{"config", request.config.placement},
       {"gpu", {.optimizer = TierChoice::kDevice}},
       {"device", {.parameters = TierChoice::kDevice, .optimizer = TierChoice::kHost}},
       {"host", {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost}},
       {"nvme", {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme}},
       {"mixed", {}}}};
  std::vector<PlannedPlacement> all(choices.size());
  // A placement that does not fit looks for the budgets that would do, which takes long.
  request.run_each(all.size(), [&](std::size_t i) {
    all[i] = evaluation.place(choices[i].first, choices[i].second);
  });
  StepCosts costs(evaluation, request.run_each);
  PlannedPlacement& own = all.front();
  for (const PlannedPlacement& planned : all)
    if (planned.obstacle.empty()) costs.want(planned.placement, planned.policy);
  std::array<PlannedPlacement, kPolicies.size()> by_policy;
  std::optional<PlannedPlacement> on_other;
  if (own.obstacle.empty()) {
    request.run_each(kPolicies.size(),
                     [&](std::size_t i) { by_policy[i] = evaluation.place_under(kPolicies[i]); });
    for (std::size_t i = 0; i < kPolicies.size(); ++i) {
      costs.want(own.placement, kPolicies[i]);
      if (by_policy[i].obstacle.empty()) costs.want(by_policy[i].placement, kPolicies[i]);
    }
    if (!request.machine.device_is_host)
      on_other = evaluation.place_on(other_than(request.config.optimizer.update_on));
    if (on_other && on_other->obstacle.empty()) costs.want(on_other->placement, on_other->policy);
  }
  costs.simulate();
  for (PlannedPlacement& planned : all)
    if (planned.obstacle.empty()) planned.step = costs.of(planned.placement, planned.policy);
  if (!own.obstacle.empty()) return all;
  if (on_other && on_other->obstacle.empty())
    own.on_other_processor = {.policy = on_other->policy,
                              .placement = on_other->placement,
                              .step = costs.of(on_other->placement, on_other->policy)};
  std::vector<StepCost> bounds;
  for (const PlannedPlacement& planned : by_policy) {
    if (!planned.obstacle.empty()) continue;
    bounds.push_back(costs.of(own.placement, planned.policy));
    own.policies.push_back({.policy = planned.policy,
                            .placement = planned.placement,
                            .step = costs.of(planned.placement, planned.policy)});
  }
  own.least = minimum_of(bounds);
  return all;
}

}  // namespace sluice
