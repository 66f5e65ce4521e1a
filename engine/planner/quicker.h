// Says what to change if a plan's own step is not the quickest of those that it has simulated.
// "auto" homes save traffic, which nearly always saves time. Only a plan simulates steps, so only
// there the exceptions are seen. Pure; any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/planner/planner.h"

namespace sluice {

struct Quicker {
  double step_s = 0;
  // The config's, with the change.
  Config::Placement placement;
  OverlapPolicy overlap{};
};

// The quickest of `all`, which plan_alternatives() has made for `config`, and of the policies that
// keep its results; empty if the config itself is within half a percent of it.
std::optional<Quicker> quicker_than(const std::vector<PlannedPlacement>& all, const Config& config);

// The settings for it: "placement.parameters=auto placement.optimizer=device".
std::string settings_of(const Quicker& quicker, const Config& config);

}  // namespace sluice
