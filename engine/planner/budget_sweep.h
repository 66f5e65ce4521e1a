// The cost of a planned step under smaller and larger budgets of host memory. The result shows the
// budget beyond which more memory does not help. The functions are pure, and any thread may call
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/planner/planner.h"

namespace sluice {

struct BudgetStep {
  std::uint64_t host_bytes = 0;  // the budget
  std::uint64_t nvme_bytes = 0;  // bytes that the placement takes on storage
  OverlapPolicy policy{};
  StepCost step;
};

// Plans and simulates the config's own placement under about `points` budgets. The budgets grow by
// equal factors. The first budget is the smallest one that fits. Beyond the last budget, the
// placement no longer changes. The config's own budget is included if it fits. The result is empty
// if no budget fits.
// Requires: points >= 2.
std::vector<BudgetStep> steps_by_host_memory(const PlanRequest& request, std::size_t points);

// Returns the first of `steps` whose time is within one percent of the shortest time.
// Requires: steps is not empty.
const BudgetStep& enough_memory(const std::vector<BudgetStep>& steps);

}  // namespace sluice
