// Predicts a step on another machine or under other settings. Rates and times are taken from a
// trace, and the engine is planned again from the trace's description. Then the bound's simulation
// (engine/bound/bound_simulation.h) runs the step. If the recorded step took longer than its own
// simulation, the difference is added to every prediction. If the recorded step took less time, the
// prediction is scaled. Both cases are shown as the model's error. A model with too large an error
// predicts nothing.
//
// Thread rule: pure.
#pragma once

#include <string>
#include <vector>

#include "engine/bound/step_cost.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// The largest allowed error of the model for the recorded step. If the error is larger, the model
// is no evidence about other settings.
inline constexpr double kWhatIfErrorMax = 0.25;

struct WhatIf {
  double measured_s = 0;   // the recorded steps' mean
  StepCost replayed;       // the model's cost of the recorded step
  StepCost changed;        // the model's cost with the settings
  double predicted_s = 0;  // `changed`, plus what the model leaves out
  OverlapPolicy policy{};
  Rates rates;                        // recorded
  std::vector<std::string> left_out;  // the parts that the model leaves out, in words

  // The error of the model alone for the recorded step.
  double error() const { return replayed.step_s / measured_s - 1; }
};

// `settings` are KEY=VALUE. Depending on the key, VALUE is a factor ("2x"), a number or a size.
//   nvme, nvme.read, nvme.write, copy, adam, compute   speed: a factor
//   nvme.latency                                       a factor
//   drives                                             the number of drives in place of one
//   prefetch_window                                    units that the device window holds
//   lanes                                              blocks in the optimizer pass
//   memory.host, memory.device                         sizes; the placement is planned again
//   policy                                             as optimizer.overlap, but not "auto"
// Fails with:
// - kConfig: a setting is wrong.
// - kInput: the trace has less than three steps, or does not describe its engine.
// - kInput: the model misses the recorded step by more than kWhatIfErrorMax.
// - kOutOfMemory: a budget is too small.
WhatIf what_if(const TraceAnalysis& analysis, const std::vector<std::string>& settings);

std::string text_of(const WhatIf& what_if);

}  // namespace sluice
