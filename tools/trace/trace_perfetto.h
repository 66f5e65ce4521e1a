// Writes traces in Perfetto's own format, which uses protobuf.
#pragma once

#include <vector>

#include "tools/cli/output_file.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// Each rank becomes a process. A process has a track for its steps, and one track per unit. Below a
// unit's track, there are tracks for the unit's computation, waits, storage, copies and other kinds
// of spans. If spans of one kind overlap, they are placed on several tracks with the same name.
// Perfetto draws tracks with the same name as one track. Counters show the number of requests at
// each drive.
void write_perfetto(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
