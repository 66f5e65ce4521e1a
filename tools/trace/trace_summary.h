// The summary of traces for a terminal, in at most 40 lines. It contains a verdict, the parts of a
// step's time, the rates of the drives, and the longest waits with their remedies.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_engine.h"

namespace sluice {

// The rates that all drives together can reach, for comparison; 0 = unknown.
struct PeakRates {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
};

struct SummaryOptions {
  PeakRates peaks;
  std::uint64_t bytes_written_rating = 0;  // of all drives together; 0 = unknown
};

// The bytes that a step reads from storage and writes to storage.
struct StorageBytes {
  double read_per_step = 0;
  double written_per_step = 0;
  // The bytes that a step has to move, because of the placement of the state; 0 = unknown. Forward
  // and backward each read every parameter on storage. The update reads every optimizer record
  // once. Parameters and records are written once.
  double ideal_read = 0;
  double ideal_written = 0;
  double written_per_day = 0;
};

// The function counts the steps whose update ended before the trace ended, so the last step does
// not count. The first step does not count either, because it finds none of its data in memory.
// Returns nothing if the trace has less than three steps.
std::optional<StorageBytes> storage_bytes(const TraceAnalysis& rank, const TracedEngine& engine);

// Requires: `ranks` is not empty.
const TraceAnalysis& slowest_of(const std::vector<TraceAnalysis>& ranks);

std::string summary_of(const std::vector<TraceAnalysis>& ranks, const SummaryOptions& options);

// A group of waits with the same cause. If the cause is a missing buffer, all waits of the group
// are for the same kind of buffer.
struct StallGroup {
  StallCause cause = StallCause::kEngine;
  TraceReason reason = TraceReason::kNone;  // the reason with the longest time
  std::uint64_t spans = 0;
  std::uint64_t total_ns = 0;
  std::uint32_t unit = kTraceNone;   // the unit with the longest waits
  std::uint32_t block = kTraceNone;  // the block of this unit's longest wait
};

// Returns groups of the waits in the steady steps (tools/trace/trace_steps.h), the group with the
// longest time first. Waits without a cause are left out. Waits that delayed neither computation
// nor the end of a step are left out, too.
std::vector<StallGroup> group_stalls(const TraceAnalysis& analysis);

// Returns a text that suggests how to avoid the waits of `group`, with numbers.
std::string advice_for(const StallGroup& group, const TraceAnalysis& analysis,
                       const TracedEngine& engine);

}  // namespace sluice
