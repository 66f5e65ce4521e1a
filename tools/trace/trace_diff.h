// Two traces side by side: how much longer the second one's steps are, by part and by unit, with
// 95 % confidence intervals of the differences (Welch's t).
//
// Thread rule: pure.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

// The change of one quantity over the steps of two traces, in milliseconds per step.
struct TraceChange {
  std::string name;
  double before_ms = 0;
  double after_ms = 0;
  double margin_ms = 0;  // the difference is after - before, give or take this; NaN with one step

  double difference_ms() const { return after_ms - before_ms; }
  // The interval leaves no doubt about the sign.
  bool is_certain() const;
};

struct TraceDiff {
  TraceChange step;
  std::vector<TraceChange> parts;
  std::vector<TraceChange> causes;
  std::vector<TraceChange> units;  // computation and waits, those that changed most first

  // The step is longer by more than `percent`, and not by chance.
  bool is_regression(double percent) const;
};

// The first step of each is left out where there are others: it touches memory for the first time.
// Fails with: kInput when one of them has no step.
TraceDiff diff_of(const TraceAnalysis& before, const TraceAnalysis& after);

std::string text_of(const TraceDiff& diff);

}  // namespace sluice
