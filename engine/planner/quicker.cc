#include "engine/planner/quicker.h"

#include <string_view>

#include <fmt/ranges.h>

#include "engine/planner/plan_evaluation.h"

namespace sluice {
namespace {

constexpr double kNoticed = 0.995;
constexpr double kWorthMemory = 0.95;

}  // namespace

std::optional<Quicker> quicker_than(const std::vector<PlannedPlacement>& all,
                                    const Config& config) {
  const PlannedPlacement& own = all.front();
  if (!own.obstacle.empty()) return std::nullopt;
  double least_s = kNoticed * own.step.step_s;
  std::optional<Quicker> found;
  const auto look_at = [&](double step_s, const Config::Placement& placement, OverlapPolicy overlap,
                           UpdateProcessor update_on) {
    if (step_s >= least_s) return;
    least_s = step_s;
    found = Quicker{
        .step_s = step_s, .placement = placement, .overlap = overlap, .update_on = update_on};
  };
  const Config::Optimizer& optimizer = config.optimizer;
  for (const PlannedPlacement& planned : all)
    if (planned.obstacle.empty())
      look_at(planned.step.step_s, planned.choices, optimizer.overlap, optimizer.update_on);
  for (const PlannedChange& change : own.policies)
    if (may_be_eager(config) || change.policy != OverlapPolicy::kEager)
      look_at(change.step.step_s, config.placement, change.policy, optimizer.update_on);
  if (own.on_other_processor)
    look_at(own.on_other_processor->step.step_s, config.placement, optimizer.overlap,
            other_than(optimizer.update_on));
  return found;
}

std::optional<Quicker> quickest_that_fits(const std::vector<PlannedPlacement>& all,
                                          const Config& config) {
  if (all.front().obstacle.empty()) return std::nullopt;
  std::optional<Quicker> found;
  for (const PlannedPlacement& planned : all) {
    if (!planned.obstacle.empty() || (found && found->step_s <= planned.step.step_s)) continue;
    found = Quicker{.step_s = planned.step.step_s,
                    .placement = planned.choices,
                    .overlap = config.optimizer.overlap,
                    .update_on = config.optimizer.update_on};
  }
  return found;
}

std::optional<MoreMemory> more_memory_for(const PlanRequest& request, const PlannedPlacement& own) {
  if (!own.obstacle.empty()) return std::nullopt;
  PlanRequest larger = request;
  const std::uint64_t budget = own.placement.host_budget_bytes;
  const PlanEvaluation evaluation(larger);
  const auto step_s = [&](const PlannedPlacement& planned, std::uint64_t blocks_max) {
    return evaluation.step_of(planned.placement, planned.policy, evaluation.rates(), blocks_max)
        .step_s;
  };
  // Steps at one grain are compared with each other.
  const double own_s = step_s(own, kBlocksOfAGlance);
  for (const std::uint64_t quarters : {5, 6, 8, 16}) {
    larger.config.memory.host_bytes = budget / 4 * quarters;
    const PlannedPlacement planned = evaluation.place("config", larger.config.placement);
    if (!planned.obstacle.empty() || step_s(planned, kBlocksOfAGlance) >= kWorthMemory * own_s)
      continue;
    return MoreMemory{.more_bytes = budget / 4 * (quarters - 4),
                      .step_s = step_s(planned, kBlocksSimulatedMax)};
  }
  return std::nullopt;
}

std::string settings_of(const Quicker& quicker, const Config& config) {
  std::vector<std::string> settings;
  const auto compare = [&](std::string_view key, TierChoice wanted, TierChoice given) {
    if (wanted != given) settings.push_back(fmt::format("placement.{}={}", key, name_of(wanted)));
  };
  compare("parameters", quicker.placement.parameters, config.placement.parameters);
  compare("optimizer", quicker.placement.optimizer, config.placement.optimizer);
  compare("gradients", quicker.placement.gradients, config.placement.gradients);
  if (quicker.overlap != config.optimizer.overlap)
    settings.push_back(fmt::format("optimizer.overlap={}", name_of(quicker.overlap)));
  if (quicker.update_on != config.optimizer.update_on)
    settings.push_back(fmt::format("optimizer.update_on={}", name_of(quicker.update_on)));
  return fmt::format("{}", fmt::join(settings, " "));
}

}  // namespace sluice
