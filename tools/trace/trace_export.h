// These functions write traces for other programs. There are three formats: CSV, JSON, and Chrome's
// JSON. Perfetto can open Chrome's JSON.
#pragma once

#include <vector>

#include "tools/cli/output_file.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// Writes Chrome's JSON. Each rank becomes a process of the trace. Steps, computation, waits and
// updates become slices of threads. Transfers become async events, because they overlap. Flow
// arrows lead from the read of a block to the computation that uses the block. For each drive, one
// counter shows the number of requests, and another counter shows the rate.
void write_chrome(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

// Writes a file with one row per record. The file gives kinds, units and reasons as names, not as
// numbers.
void write_csv(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

// Writes a file of the form {"ranks": [{"rank", "steps", "stalls", "records", "engine"}]}. Times
// are in nanoseconds.
void write_json(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
