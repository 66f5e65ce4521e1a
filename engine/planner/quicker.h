// Finds a change of settings that makes the step quicker, if a plan has simulated such a step.
// Homes chosen by "auto" save traffic, which nearly always saves time. Exceptions are seen only in
// a plan, because only a plan simulates steps. Pure; any thread.
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

// Returns the quickest of `all` (from plan_alternatives() for `config`) and of the policies that do
// not change results. Empty if the config itself is within half a percent of the quickest.
std::optional<Quicker> quicker_than(const std::vector<PlannedPlacement>& all, const Config& config);

// If the config itself (the first of `all`) does not fit, returns the quickest of `all` that fits;
// otherwise nothing.
std::optional<Quicker> quickest_that_fits(const std::vector<PlannedPlacement>& all,
                                          const Config& config);

// A larger budget of host memory, and the step under this budget.
struct MoreMemory {
  std::uint64_t more_bytes = 0;  // beside the budget
  double step_s = 0;
};

// Tries a few larger budgets, from a quarter more to four times as much. Returns the smallest one
// whose step is at least 5 % quicker than the step of `own`, the config's own placement. Empty if
// there are no such settings, or if the model has so many blocks that the search would take long.
std::optional<MoreMemory> more_memory_for(const PlanRequest& request, const PlannedPlacement& own);

// The settings that make the change, such as "placement.parameters=auto
// placement.optimizer=device".
std::string settings_of(const Quicker& quicker, const Config& config);

}  // namespace sluice
