// Where a plan's own step is not the quickest of what it has looked at: what to change. "auto"
// homes save traffic, which nearly always saves time; only a plan simulates steps, so only there
// can it be seen where they do not. Pure; any thread.
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
// leave its results as they are; nothing where the config comes within half a percent of it.
std::optional<Quicker> quicker_than(const std::vector<PlannedPlacement>& all, const Config& config);

// The settings for it: "placement.parameters=auto placement.optimizer=device".
std::string settings_of(const Quicker& quicker, const Config& config);

}  // namespace sluice
