// The step of a plan under smaller and larger budgets of host memory. The result shows the budget
// beyond which more memory does not help. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/planner/planner.h"

namespace sluice {

struct BudgetStep {
  std::uint64_t host_bytes = 0;  // the budget
  std::uint64_t nvme_bytes = 0;  // that the placement takes on storage
  OverlapPolicy policy{};
  StepCost step;
};

// The function plans and simulates the config's own placement under about `points` budgets. The
// budgets grow by equal factors. The first is the smallest budget that fits, and the last is the
// smallest budget beyond which the placement no longer changes. If the config's own budget fits, it
// is one of these budgets. The result is empty if no budget fits.
// Requires: points >= 2.
std::vector<BudgetStep> steps_by_host_memory(const PlanRequest& request, std::size_t points);

// The first of `steps` whose step is within one percent of the quickest.
// Requires: steps is not empty.
const BudgetStep& enough_memory(const std::vector<BudgetStep>& steps);

}  // namespace sluice
