// Compares two traces. For each part of a step and for each unit, the result says how much more
// time the second trace needs per step. Each difference has a 95 % confidence interval (Welch's
// t-test).
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

// The change of one quantity from the first trace to the second trace, in milliseconds per step.
struct TraceChange {
  std::string name;
  double before_ms = 0;
  double after_ms = 0;
  double margin_ms = 0;  // half the width of the confidence interval; NaN if a trace has one step

  double difference_ms() const { return after_ms - before_ms; }
  // Returns whether the confidence interval lies entirely above 0, or entirely below 0.
  bool is_certain() const;
};

// The struct describes a setting, or a fact about the run, that differs between two traces.
struct TraceSetting {
  std::string name;  // a key of the config, or the subject of the fact
  std::string before;
  std::string after;
};

struct TraceDiff {
  TraceChange step;
  std::vector<TraceChange> parts;
  std::vector<TraceChange> causes;
  std::vector<TraceChange> units;  // computation and waits, largest change first
  // If one of the traces does not describe its engine, the list is empty and `are_settings_known`
  // is false.
  std::vector<TraceSetting> settings;
  bool are_settings_known = false;

  // Returns true if the change of the step's time is certain, and the step is more than `percent`
  // percent longer.
  bool is_regression(double percent) const;
};

// If a trace has several steps, the function ignores the first step, because the first step touches
// memory for the first time.
// Fails with kInput if one of the traces has no step.
TraceDiff diff_of(const TraceAnalysis& before, const TraceAnalysis& after);

std::string text_of(const TraceDiff& diff);

}  // namespace sluice
