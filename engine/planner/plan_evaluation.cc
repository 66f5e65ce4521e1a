#include "engine/planner/plan_evaluation.h"

#include <algorithm>
#include <utility>

#include "engine/plan/sharding.h"
#include "engine/planner/rank_traffic.h"

namespace sluice {

PlanEvaluation::PlanEvaluation(const PlanRequest& request)
    : request_(request),
      model_(validated(request.model)),
      layout_(plan_layout(request.config, model_,
                          shard_of(request.config.sharding, 0, request.machine.ranks))),
      schedule_(training_schedule(model_, request.micro_batches, request.order)) {}

Rates PlanEvaluation::rates(double compute_factor) const {
  Rates rates = request_.rates;
  for (UnitTime& unit : rates.units) {
    unit.forward_s *= compute_factor;
    unit.backward_s *= compute_factor;
  }
  if (!rates.units.empty()) return rates;
  const double backward = request_.config.activations.home == ActivationHome::kKeep ? 2 : 3;
  for (const double flops : request_.forward_flops)
    rates.units.push_back({.forward_s = compute_factor * flops / request_.flops,
                           .backward_s = compute_factor * backward * flops / request_.flops});
  return rates;
}

double PlanEvaluation::compute_s(const Rates& rates) const {
  double sum_s = 0;
  for (const ScheduledUse& use : schedule_) {
    const UnitTime& time = rates.units[index_of(use.unit)];
    sum_s += use.pass == Pass::kForward ? time.forward_s : time.backward_s;
  }
  return sum_s;
}

PlannedPlacement PlanEvaluation::place(const std::string& name,
                                       const Config::Placement& choices) const {
  return place(name, choices, request_.config);
}

PlannedPlacement PlanEvaluation::place_under(OverlapPolicy policy) const {
  Config config = request_.config;
  config.optimizer.overlap = policy;
  return place(std::string(name_of(policy)), config.placement, std::move(config));
}

PlannedPlacement PlanEvaluation::place_on(UpdateProcessor processor) const {
  Config config = request_.config;
  config.optimizer.update_on = processor;
  return place(std::string(name_of(processor)), config.placement, std::move(config));
}

PlannedPlacement PlanEvaluation::place(const std::string& name, const Config::Placement& choices,
                                       Config config) const {
  PlannedPlacement planned;
  planned.name = name;
  planned.choices = choices;
  config.placement = choices;
  std::optional<RunPlan> plan =
      try_plan(config, model_, layout_, request_.machine, planned.obstacle);
  if (!plan) return planned;
  planned.placement = std::move(plan->placement);
  planned.rank_traffic = rank_traffic(planned.placement);
  planned.policy = plan->policy;
  planned.compute_s = compute_s(rates());
  return planned;
}

StepCost PlanEvaluation::step_of(const Placement& placement, OverlapPolicy policy,
                                 const Rates& rates, std::uint64_t blocks_max) const {
  StepCost cost =
      bound_of_blocks({shape(), layout_, placement, request_.config.storage.state.commit_every},
                      rates, policy, blocks_max);
  // Collectives are on streams of their own, ahead of the uses that need them.
  const double link_s = link_seconds(rank_traffic(placement), request_.config.sharding,
                                     request_.machine.ranks, rates.link_bytes_per_second);
  cost.busy_s[static_cast<std::size_t>(Resource::kLinks)] = link_s;
  cost.step_s = std::max(cost.step_s, link_s);
  return cost;
}

ActivationShape PlanEvaluation::shape() const {
  return {.model = model_, .micro_batches = request_.micro_batches, .order = request_.order};
}

RankTraffic PlanEvaluation::rank_traffic(const Placement& placement) const {
  return predict_rank_traffic(request_.config.sharding, request_.machine.ranks, shape(), layout_,
                              placement);
}

}  // namespace sluice
