// The steps from which the figures of a trace are computed, and their means. Every report about
// "the step" uses these means, including the run's own report, so that all reports agree.
//
// "The step" is a mean, not a median. The parts of a step add up to the mean, and the mean times
// the number of steps is the time of the run. The rates behind T_min, T_bound and every prediction
// are means as well. Limits from mean rates have to be compared with means, because a median may
// seem to beat such a limit.
//
// Thread rule: pure.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

// All steps that ended. If there are other steps, the first step is left out. The first step
// touches memory for the first time, and finds none of its data in memory.
std::vector<StepShare> steady_steps(const TraceAnalysis& rank);

struct StepMeans {
  std::size_t count = 0;
  double total_s = 0;
  double compute_s = 0;
  double exposed_io_s = 0;
  double exposed_optimizer_s = 0;
  double other_s = 0;
  double background_s = 0;  // storage, copies or the optimizer were at work
  double hidden_s = 0;      // the part of background_s that nothing waited for
  double least_s = 0;       // the shortest and the longest step
  double most_s = 0;

  double share_of_step(double part_s) const { return total_s <= 0 ? 0 : part_s / total_s; }
  // Returns 1 if nothing was at work.
  double hidden_share() const { return background_s <= 0 ? 1 : hidden_s / background_s; }
};

// Returns zeros if `steps` is empty.
StepMeans means_of(const std::vector<StepShare>& steps);

// The means in one line. The line names the limit, and the most that improvements elsewhere can
// save.
std::string verdict_of(const TraceAnalysis& rank);

}  // namespace sluice
