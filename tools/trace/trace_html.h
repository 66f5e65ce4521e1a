// Returns the page of a trace. The page is one self-contained HTML file that a browser can open
// from disk. The file stays below 5 MB: in a long trace, spans that lie close together are joined,
// and the page leaves out steps and rows (tools/trace/trace_page_room.h). The page says so.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_summary.h"

namespace sluice {

// Fails with kInput if there are so many ranks that the page would be larger.
std::string html_of(const std::vector<TraceAnalysis>& ranks, const PeakRates& peaks);

}  // namespace sluice
