// Computes the rates of the machine on which a trace was recorded. The rates follow from the
// records of the trace.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include "engine/bound/step_cost.h"
#include "engine/plan/layout.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// The result includes the computation time of each unit. The first step is ignored.
Rates rates_of(const TraceAnalysis& analysis, const Layout& layout);

}  // namespace sluice
