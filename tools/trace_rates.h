// The rates of the machine that a trace was taken on, as its records show them.
//
// Thread rule: pure.
#pragma once

#include "engine/layout.h"
#include "engine/step_cost.h"
#include "tools/trace_analysis.h"

namespace sluice {

// With the time of each unit's computation. The first step is left out.
Rates rates_of(const TraceAnalysis& analysis, const Layout& layout);

}  // namespace sluice
