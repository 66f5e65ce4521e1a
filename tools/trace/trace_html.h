// Returns the page of a trace. The page is one self-contained HTML file that a browser can open
// from disk. In a long trace, spans that lie close together are joined, so that the file stays
// below 5 MB.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_summary.h"

namespace sluice {

std::string html_of(const std::vector<TraceAnalysis>& ranks, const PeakRates& peaks);

}  // namespace sluice
