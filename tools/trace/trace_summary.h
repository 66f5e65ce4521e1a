// The summary of traces for a terminal, in at most 40 lines. The summary contains a verdict, the
// parts of a step's time, the rates of the drives, and the longest waits with their remedies.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/report/plan_rates.h"
#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_engine.h"

namespace sluice {

// The rates that all drives together can reach; 0 = unknown. The summary compares the measured
// rates with these rates.
struct PeakRates {
  double read_bytes_per_second = 0;
  double write_bytes_per_second = 0;
  std::vector<DriveRates> drives = {};  // each drive alone; empty = unknown
};

struct SummaryOptions {
  PeakRates peaks;
  std::uint64_t bytes_written_rating = 0;  // of all drives together; 0 = unknown
};

// The bytes that a step reads from storage and writes to storage.
struct StorageBytes {
  double read_per_step = 0;
  double written_per_step = 0;
  // A step has to move at least these bytes, because of the placement of the state; 0 = unknown.
  // The forward pass and the backward pass each read every parameter that lies on storage. The
  // update reads every optimizer record once. Parameters and records are written once.
  double ideal_read = 0;
  double ideal_written = 0;
  double written_per_day = 0;
};

// The function leaves out the first step, because this step finds none of its data in memory. The
// function also leaves out the last step, because its update may end after the trace. Returns
// nothing if the trace has fewer than three steps.
std::optional<StorageBytes> storage_bytes(const TraceAnalysis& rank, const TracedEngine& engine);

// The bytes that all of `ranks` together write to storage in a day.
double written_per_day(const std::vector<TraceAnalysis>& ranks);

// Returns the rate that the drive of `flow` can reach by itself. A drive of the calibration is the
// drive of a run if both have the same path. If the calibration has no path of the run, and both
// have the same number of drives, the drives with the same number are the same. Relative paths of
// several drives have no such number. Returns 0 if the rate is unknown, or if `flow` is not a flow
// of a drive.
double peak_of(const FlowStats& flow, const TracedEngine& engine, const PeakRates& peaks);

// Requires: `ranks` is not empty.
const TraceAnalysis& slowest_of(const std::vector<TraceAnalysis>& ranks);

std::string summary_of(const std::vector<TraceAnalysis>& ranks, const SummaryOptions& options);

// A group of all waits that have the same cause.
struct StallGroup {
  StallCause cause = StallCause::kEngine;
  TraceReason reason = TraceReason::kNone;  // the reason with the longest total time
  std::uint64_t spans = 0;
  std::uint64_t total_ns = 0;
  std::uint32_t unit = kTraceNone;   // the unit with the longest waits
  std::uint32_t block = kTraceNone;  // the block of this unit's longest wait
};

// Returns one group for each cause of waits in the steady steps (tools/trace/trace_steps.h). The
// group with the longest time is first. Waits without a cause are left out. Waits that delayed
// neither computation nor the end of a step are left out, too.
std::vector<StallGroup> group_stalls(const TraceAnalysis& analysis);

// Returns a text that suggests how to avoid the waits of `group`. The text contains numbers.
std::string advice_for(const StallGroup& group, const TraceAnalysis& analysis,
                       const TracedEngine& engine);

// Checks two settings of the run: the policy of the updates, and the queue depth of the drives. If
// a setting makes the steps longer, the result has a line about the setting. The line names the
// setting's key and value, gives the waiting times, and suggests another value.
std::vector<std::string> setting_advice(const TraceAnalysis& analysis, const TracedEngine& engine);

}  // namespace sluice
