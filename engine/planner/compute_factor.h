// From how much computation on a step hides all else: what `sluice plan` says of tokens. Pure.
#pragma once

#include <optional>

#include "engine/planner/planner.h"

namespace sluice {

// How many times the computation of `request` a step needs so that its time is computation's to
// 5 %, under the config's placement, which is `own`; nothing when a million times what is busiest
// is not enough, or the placement does not fit. With very many blocks and units that are all alike,
// a model of fewer such units says where to look.
std::optional<double> compute_factor_that_hides(const PlanRequest& request,
                                                const PlannedPlacement& own);

}  // namespace sluice
