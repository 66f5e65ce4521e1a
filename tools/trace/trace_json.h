// The output of `sluice trace` as JSON. The JSON contains the same figures as the text for people.
// The figures are not rounded. Times are in seconds. Unknown figures are null.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_diff.h"
#include "tools/trace/trace_summary.h"
#include "tools/trace/trace_whatif.h"

namespace sluice {

std::string summary_json(const std::vector<TraceAnalysis>& ranks, const SummaryOptions& options);
// `percent` has the same meaning as in TraceDiff::is_regression().
std::string diff_json(const TraceDiff& diff, double percent);
std::string whatif_json(const WhatIf& what_if);

}  // namespace sluice
