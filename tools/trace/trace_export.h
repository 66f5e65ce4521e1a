// Traces for other programs: Chrome's JSON (Perfetto opens it), CSV and JSON of the records.
#pragma once

#include <vector>

#include "tools/cli/output_file.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// A process for each rank. Steps, computation, waits and updates are slices of threads; transfers,
// which overlap, are async events; flows lead from a block's read to the computation that uses it;
// counters show each drive's depth and rate.
void write_chrome(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

// One row per record, with names instead of numbers.
void write_csv(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

// {"ranks": [{"rank", "steps", "stalls", "records", "engine"}]}; times in nanoseconds.
void write_json(OutputFile& file, const std::vector<TraceAnalysis>& ranks);

}  // namespace sluice
