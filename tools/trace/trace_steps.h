// The steps that the figures of a trace are over, and their means. Every report that speaks of "the
// step" takes these, the run's own too, so that all say the same.
//
// It is a mean, not a median: the parts of a step add up to it, its product with the number of
// steps is the run, and the rates behind T_min, T_bound and every prediction are means as well.
// Beside a median, a limit from mean rates may look beaten.
//
// Thread rule: pure.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

// All steps that ended, without the first one where there are others: it touches memory for the
// first time and finds nothing in it.
std::vector<StepShare> steady_steps(const TraceAnalysis& rank);

struct StepMeans {
  std::size_t count = 0;
  double total_s = 0;
  double compute_s = 0;
  double exposed_io_s = 0;
  double exposed_optimizer_s = 0;
  double other_s = 0;
  double background_s = 0;  // storage, copies or the optimizer were at work
  double hidden_s = 0;      // of that, while nothing waited for them
  double least_s = 0;       // the shortest and the longest step
  double most_s = 0;

  double share_of_step(double part_s) const { return total_s <= 0 ? 0 : part_s / total_s; }
  // 1 when nothing was at work.
  double hidden_share() const { return background_s <= 0 ? 1 : hidden_s / background_s; }
};

// All zeros without a step.
StepMeans means_of(const std::vector<StepShare>& steps);

// The means in one line: what binds, and the most that can be won elsewhere.
std::string verdict_of(const TraceAnalysis& rank);

}  // namespace sluice
