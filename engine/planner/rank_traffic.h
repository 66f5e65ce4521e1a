// The functions predict how many bytes a rank's collectives move in a step. The functions are pure,
// and any thread may call them.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include <sluice/step_report.h>
#include "engine/plan/activation_plan.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"

namespace sluice {

// The result equals StepReport::rank_traffic of a step in the steady state. For one rank, all
// counts are 0. `layout` is the layout of one of `ranks` ranks, and `placement` belongs to this
// layout.
RankTraffic predict_rank_traffic(const Config::Sharding& sharding, std::uint32_t ranks,
                                 const ActivationShape& step, const Layout& layout,
                                 const Placement& placement);

// The number of seconds for which `traffic` occupies a rank's link. `link_bytes_per_second` is the
// link's rate in each direction. In an operation among N ranks, a rank sends and receives (N - 1) /
// N of the operation's bytes.
double link_seconds(const RankTraffic& traffic, const Config::Sharding& sharding,
                    std::uint32_t ranks, double link_bytes_per_second);

}  // namespace sluice
