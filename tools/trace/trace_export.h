// These functions write traces for other programs. The formats are Chrome's JSON (which Perfetto
// opens), CSV and JSON.
#pragma once

#include <vector>

#include "tools/cli/output_file.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// Each rank becomes a process of the trace. Steps, computation, waits and updates become slices of
// threads. Transfers overlap, so they become async events. Flow arrows lead from the read of a
// block to the computation that uses the block. Counters show each drive's depth and rate.
void write_chrome(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

// The file has one row per record, with names instead of numbers.
void write_csv(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

// The file is {"ranks": [{"rank", "steps", "stalls", "records", "engine"}]}, with times in
// nanoseconds.
void write_json(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
