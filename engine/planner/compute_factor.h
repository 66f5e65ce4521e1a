// How much computation a step needs to hide everything else: for `sluice plan`, in tokens. Pure.
#pragma once

#include <optional>

#include "engine/planner/planner.h"

namespace sluice {

// How many times the computation of `request` a step needs so that computation makes up its time to
// within 5 %, under the config's placement, which is `own`. Empty when a million times the busiest
// resource is not enough, or the placement does not fit. With very many blocks and units that are
// all alike, a model with fewer such units shows where to look.
std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own);

}  // namespace sluice
