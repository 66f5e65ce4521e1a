// Finds a change of settings that makes the step quicker, among the changes that a plan has
// simulated. Homes chosen by "auto" save traffic, and less traffic nearly always means less time.
// Exceptions are seen only in a plan, because only a plan simulates steps. Pure; any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/planner/planner.h"

namespace sluice {

struct Quicker {
  double step_s = 0;
  // The config's placement with the change.
  Config::Placement placement;
  OverlapPolicy overlap{};
};

// Returns the quickest of `all` and of the policies that do not change results. `all` comes from
// plan_alternatives() for `config`. The result is empty if the config itself is within half a
// percent of the quickest.
std::optional<Quicker> quicker_than(const std::vector<PlannedPlacement>& all, const Config& config);

// If the config itself does not fit, the call returns the quickest of `all` that fits. Otherwise
// returns nothing. The config itself is the first of `all`.
std::optional<Quicker> quickest_that_fits(const std::vector<PlannedPlacement>& all,
                                          const Config& config);

// A larger budget of host memory, and the step under this budget.
struct MoreMemory {
  std::uint64_t more_bytes = 0;  // beside the budget
  double step_s = 0;
};

// The function tries a few larger budgets, from a quarter more to four times as much. Returns the
// smallest one whose step is at least 5 % quicker than the step of `own`, the config's own
// placement. The result is empty if there is no such budget.
std::optional<MoreMemory> more_memory_for(const PlanRequest& request, const PlannedPlacement& own);

// The settings that make the change, such as "placement.parameters=auto
// placement.optimizer=device".
std::string settings_of(const Quicker& quicker, const Config& config);

}  // namespace sluice
