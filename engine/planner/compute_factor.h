// The amount of computation that is needed to hide all other work of a step. `sluice plan` prints
// this amount in tokens. The function is pure.
#pragma once

#include <optional>

#include "engine/planner/planner.h"

namespace sluice {

// Returns a factor for the step's computation. With this factor, the step takes at most 5 % longer
// than its computation. `own` is the config's placement. The result is empty if the placement does
// not fit. The result is also empty if even a million times the time of the busiest resource is not
// enough computation. If a model has many blocks, a simulation with larger blocks gives a first
// guess.
std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own);

}  // namespace sluice
