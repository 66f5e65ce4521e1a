// The summary of traces on a terminal. The summary has a verdict, the parts of a step's time, the
// drives' rates, and the longest waits with their remedies. The summary has at most 40 lines.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_engine.h"

namespace sluice {

// The rates of all drives together, for comparison; 0 = unknown.
struct PeakRates {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
};

struct SummaryOptions {
  PeakRates peaks;
  std::uint64_t bytes_written_rating = 0;  // of all drives together; 0 = unknown
};

// The bytes that a step moves to and from storage.
struct StorageBytes {
  double read_per_step = 0;
  double written_per_step = 0;
  // The bytes that the placement needs. Every parameter on storage is read in forward and in
  // backward. Every record is read once, and everything is written once. 0 = unknown.
  double ideal_read = 0;
  double ideal_written = 0;
  double written_per_day = 0;
};

// The function takes the steps whose update ended while the trace ran. The last step is not one of
// these. The function also leaves out the first step, which finds nothing in memory. Returns
// nothing for a trace of less than three steps.
std::optional<StorageBytes> storage_bytes(const TraceAnalysis& rank, const TracedEngine& engine);

// Requires: `ranks` is not empty.
const TraceAnalysis& slowest_of(const std::vector<TraceAnalysis>& ranks);

std::string summary_of(const std::vector<TraceAnalysis>& ranks, const SummaryOptions& options);

// The waits with the same cause. If the cause is a missing buffer, the waits are also for the same
// kind of buffer.
struct StallGroup {
  StallCause cause = StallCause::kEngine;
  TraceReason reason = TraceReason::kNone;  // the reason with the longest time
  std::uint64_t spans = 0;
  std::uint64_t total_ns = 0;
  std::uint32_t unit = kTraceNone;   // the unit with the longest waits
  std::uint32_t block = kTraceNone;  // the block of this unit's longest wait
};

// The exposed waits of the steady steps (tools/trace/trace_steps.h), longest first. Two kinds are
// left out: waits without a cause, and waits that did not delay computation or the end of a step.
std::vector<StallGroup> group_stalls(const TraceAnalysis& analysis);

// A remedy for the waits of `group`, with numbers.
std::string advice_for(const StallGroup& group, const TraceAnalysis& analysis,
                       const TracedEngine& engine);

}  // namespace sluice
