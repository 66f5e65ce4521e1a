#include "engine/planner/budget_sweep.h"

#include <algorithm>
#include <cmath>

#include "engine/planner/plan_evaluation.h"

namespace sluice {
namespace {

constexpr std::uint64_t kMoreThanAnyHost = std::uint64_t{1} << 50;
constexpr double kNearlyEqual = 1.01;

// The request with another budget, and the plan that it leads to.
class Budgeted {
 public:
  Budgeted(const PlanRequest& request, std::uint64_t host_bytes) : request_(request) {
    request_.config.memory.host_bytes = host_bytes;
  }

  PlannedPlacement place() const {
    return PlanEvaluation(request_).place("config", request_.config.placement);
  }
  bool fits() const { return place().obstacle.empty(); }
  StepCost step_of(const PlannedPlacement& planned) const {
    const PlanEvaluation evaluation(request_);
    return evaluation.step_of(planned.placement, planned.policy, evaluation.rates());
  }

 private:
  PlanRequest request_;
};

// The least budget that fits, to one percent. Requires: `most_bytes` fits.
std::uint64_t least_budget(const PlanRequest& request, std::uint64_t most_bytes) {
  double low = 4096, high = static_cast<double>(most_bytes);
  while (high > kNearlyEqual * low) {
    const double middle = std::sqrt(low * high);
    const bool fits = Budgeted(request, static_cast<std::uint64_t>(middle)).fits();
    (fits ? high : low) = middle;
  }
  return static_cast<std::uint64_t>(high);
}

std::vector<std::uint64_t> budgets_between(std::uint64_t least_bytes, std::uint64_t most_bytes,
                                           std::size_t points) {
  std::vector<std::uint64_t> budgets{least_bytes};
  const double ratio = static_cast<double>(most_bytes) / static_cast<double>(least_bytes);
  for (std::size_t i = 1; i < points; ++i)
    budgets.push_back(static_cast<std::uint64_t>(
        static_cast<double>(least_bytes) *
        std::pow(ratio, static_cast<double>(i) / static_cast<double>(points - 1))));
  budgets.back() = most_bytes;
  return budgets;
}

}  // namespace

std::vector<BudgetStep> steps_by_host_memory(const PlanRequest& request, std::size_t points) {
  const PlannedPlacement widest = Budgeted(request, kMoreThanAnyHost).place();
  if (!widest.obstacle.empty()) return {};
  const std::uint64_t most_bytes = widest.placement.host_bytes();
  std::vector<std::uint64_t> budgets =
      budgets_between(least_budget(request, most_bytes), most_bytes, points);
  if (request.config.memory.host_bytes) budgets.push_back(*request.config.memory.host_bytes);
  std::ranges::sort(budgets);
  budgets.erase(std::ranges::unique(budgets).begin(), budgets.end());
  std::vector<BudgetStep> steps(budgets.size());
  request.run_each(budgets.size(), [&](std::size_t i) {
    const Budgeted budgeted(request, budgets[i]);
    const PlannedPlacement planned = budgeted.place();
    if (!planned.obstacle.empty()) return;
    steps[i] = {.host_bytes = budgets[i],
                .nvme_bytes = planned.placement.nvme_bytes(),
                .policy = planned.policy,
                .step = budgeted.step_of(planned)};
  });
  std::erase_if(steps, [](const BudgetStep& step) { return step.host_bytes == 0; });
  return steps;
}

const BudgetStep& enough_memory(const std::vector<BudgetStep>& steps) {
  const double least_s = std::ranges::min(steps, {}, [](const BudgetStep& step) {
                           return step.step.step_s;
                         }).step.step_s;
  return *std::ranges::find_if(
      steps, [&](const BudgetStep& step) { return step.step.step_s <= kNearlyEqual * least_s; });
}

}  // namespace sluice
