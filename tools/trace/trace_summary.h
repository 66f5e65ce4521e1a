// The summary of traces on a terminal: a verdict, where a step's time went, how the drives did, and
// what is waited for most, with what would help. At most 40 lines.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_engine.h"

namespace sluice {

// The rate of all drives together, for comparison; 0 = not known.
struct PeakRates {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
};

struct SummaryOptions {
  PeakRates peaks;
  std::uint64_t bytes_written_rating = 0;  // of the drives together; 0 = not known
};

std::string summary_of(const std::vector<TraceAnalysis>& ranks, const SummaryOptions& options);

// Waits of one cause, and of one kind of buffer where it is that.
struct StallGroup {
  StallCause cause = StallCause::kEngine;
  TraceReason reason = TraceReason::kNone;  // the one that took most of the time
  std::uint64_t spans = 0;
  std::uint64_t total_ns = 0;
  std::uint32_t unit = kTraceNone;   // the one that was waited for longest
  std::uint32_t block = kTraceNone;  // likewise, in the longest of its waits
};

// The exposed waits of the steady steps (tools/trace/trace_steps.h), longest first: without those
// that neither computation nor the end of a step waited for, and those without a cause.
std::vector<StallGroup> group_stalls(const TraceAnalysis& analysis);

// A remedy for `group`, in numbers.
std::string advice_for(const StallGroup& group, const TraceAnalysis& analysis,
                       const TracedEngine& engine);

}  // namespace sluice
