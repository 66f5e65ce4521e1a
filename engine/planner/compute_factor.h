// How much computation a step needs to hide everything else. `sluice plan` prints this amount in
// tokens. Pure.
#pragma once

#include <optional>

#include "engine/planner/planner.h"

namespace sluice {

// Returns the factor by which a step's computation has to grow so that the step takes at most 5 %
// longer than its computation. `own` is the config's placement. Empty when a million times the
// busiest resource is not enough, or the placement does not fit. For a model with very many blocks
// and equal units, a model with fewer such units gives a first guess.
std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own);

}  // namespace sluice
