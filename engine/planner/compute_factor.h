// The amount of computation that a step needs to hide everything else. `sluice plan` prints this
// amount in tokens. Pure.
#pragma once

#include <optional>

#include "engine/planner/planner.h"

namespace sluice {

// Returns a factor for the step's computation. With this factor, the step takes at most 5 % longer
// than its computation. `own` is the config's placement. The result is empty if a million times the
// busiest resource is not enough, or the placement does not fit. If a model has many blocks, a
// simulation with larger blocks gives a first guess.
std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own);

}  // namespace sluice
