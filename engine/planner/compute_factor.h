// The amount of computation that is needed to hide all other work of a step. `sluice plan` prints
// this amount in tokens. The function is pure.
#pragma once

#include <optional>

#include "engine/planner/planner.h"

namespace sluice {

// Returns a factor for the step's computation. If computation is multiplied by this factor, the
// step takes at most 5 % longer than computation alone. `own` is the config's placement. The result
// is empty if the placement does not fit, or if activations leave the device. Their transfers grow
// with the computation. The function tries factors up to a limit. At this limit, computation takes
// about a million times as long as the busiest other resource. If the limit is not large enough,
// the result is empty, too. If a model has many blocks, a simulation with larger blocks gives a
// first guess.
std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own);

}  // namespace sluice
