// The page of a trace: one HTML file with all it needs, to be opened from disk. Long traces are
// thinned out: spans closer together than some time are joined, so that the file stays below 5 MB.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_summary.h"

namespace sluice {

std::string html_of(const std::vector<TraceAnalysis>& ranks, const PeakRates& peaks);

}  // namespace sluice
