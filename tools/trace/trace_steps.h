// The functions select the steps from which the figures of a trace are computed, and compute the
// means over these steps. Every report about "the step" uses these means. The report of the run
// itself also uses these means, so that all reports agree.
//
// "The step" is a mean, not a median. The mean parts of a step add up to the mean step. If the mean
// step is multiplied by the number of steps, the result is the total time of the steps. T_min,
// T_bound and all predictions are computed from mean rates. A figure from mean rates must be
// compared with a mean step, because a median step can be shorter than T_min or T_bound.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <string>
#include <vector>

#include "tools/trace/trace_analysis.h"

namespace sluice {

// Returns how many of rank.steps() have ended. The step in which a run was killed is the last one,
// and has not ended.
std::size_t ended_steps(const TraceAnalysis& rank);

// Returns the steps that have ended. The first step of a trace is left out if there are more steps.
// The first step is slower, because the step touches memory for the first time and finds no data in
// memory. If only later steps of a trace were read (TraceSteps), none of them is left out. The
// result is empty if no step has ended.
std::vector<StepShare> steady_steps(const TraceAnalysis& rank);

// The place of the first of steady_steps() in rank.steps().
std::size_t first_steady(const TraceAnalysis& rank);

// Returns the steady steps that have an update beside them, or in them. Steps that were skipped
// because of gradients that are not finite are left out, and so are steps directly after them. A
// skipped step has the number of the step after it.
std::vector<StepShare> updated_steps(const TraceAnalysis& rank);

struct StepMeans {
  std::size_t count = 0;
  double total_s = 0;
  double compute_s = 0;
  double exposed_io_s = 0;
  double exposed_optimizer_s = 0;
  double other_s = 0;
  double background_s = 0;  // time in which storage, copies or the optimizer worked
  double hidden_s = 0;      // the part of background_s for which nothing waited
  double least_s = 0;       // the shortest and the longest step
  double most_s = 0;

  double share_of_step(double part_s) const { return total_s <= 0 ? 0 : part_s / total_s; }
  // Returns 1 if `background_s` is 0.
  double hidden_share() const { return background_s <= 0 ? 1 : hidden_s / background_s; }
};

// Returns the means over `steps`. All values are 0 if `steps` is empty.
StepMeans means_of(const std::vector<StepShare>& steps);

// Returns one line about the means. The line names the resource that limits the step. The line also
// gives a share of the step's time. A run without any wait for I/O or the optimizer would save this
// share.
std::string verdict_of(const TraceAnalysis& rank);

}  // namespace sluice
