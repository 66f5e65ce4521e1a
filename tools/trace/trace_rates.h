// The rates of the machine on which a trace was taken. The rates are computed from the trace's
// records.
//
// Thread rule: pure.
#pragma once

#include "engine/bound/step_cost.h"
#include "engine/plan/layout.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// The result includes the time of each unit's computation. The first step is left out.
Rates rates_of(const TraceAnalysis& analysis, const Layout& layout);

}  // namespace sluice
