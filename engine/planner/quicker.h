// The functions look for a change of settings that makes the step quicker. Only changes that a plan
// has simulated are considered. If the config says "auto", the homes are chosen to save traffic.
// Less traffic nearly always means less time. Only a plan can show a case in which less traffic
// takes more time, because only a plan simulates steps. The functions are pure, and any thread may
// call them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/planner/planner.h"

namespace sluice {

struct Quicker {
  double step_s = 0;
  // The placement of the config after the change.
  Config::Placement placement;
  OverlapPolicy overlap{};
  UpdateProcessor update_on{};
};

// Returns the quickest alternative. The alternatives are the placements in `all`, and the policies
// that do not change results. `all` comes from plan_alternatives() for `config`. The result is
// empty if the step of `config` itself takes at most half a percent longer than the quickest step.
std::optional<Quicker> quicker_than(const std::vector<PlannedPlacement>& all, const Config& config);

// If the config itself does not fit, the function returns the quickest placement in `all` that
// fits. Otherwise the result is empty. The config itself is the first entry of `all`.
std::optional<Quicker> quickest_that_fits(const std::vector<PlannedPlacement>& all,
                                          const Config& config);

// A larger budget of host memory, and the time of a step under this budget.
struct MoreMemory {
  std::uint64_t more_bytes = 0;  // in addition to the budget
  double step_s = 0;
};

// The function tries a few larger budgets, from 1.25 times to 4 times the present budget. Returns
// the smallest tried budget with which the step is at least 5 % quicker than with `own`. `own` is
// the config's own placement. The result is empty if there is no such budget.
std::optional<MoreMemory> more_memory_for(const PlanRequest& request, const PlannedPlacement& own);

// The settings that make the change, such as "placement.parameters=auto
// placement.optimizer=device".
std::string settings_of(const Quicker& quicker, const Config& config);

}  // namespace sluice
