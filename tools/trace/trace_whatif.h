// Predicts the time of a step on another machine or under other settings. Rates and times come from
// a trace. A new plan is made from the description of the engine in the trace. The planned step is
// then simulated (engine/bound/bound_simulation.h). The recorded step is simulated, too. If the
// recorded step took longer than its simulation, the difference is added to every prediction. If
// the recorded step took less time than its simulation, every prediction is scaled down. In both
// cases, the output shows the difference as the model's error. If the error is too large, there is
// no prediction.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <string>
#include <vector>

#include "engine/bound/step_cost.h"
#include "tools/trace/trace_analysis.h"

namespace sluice {

// The largest allowed error of the model for the recorded step. If the error is larger, the model's
// predictions for other settings are worthless.
inline constexpr double kWhatIfErrorMax = 0.25;

struct WhatIf {
  double measured_s = 0;              // the mean of the recorded steps
  StepCost replayed;                  // the model's cost of the recorded step
  StepCost changed;                   // the model's cost with the settings
  double predicted_s = 0;             // `changed`, corrected by the model's error
  OverlapPolicy policy{};             // of the recorded run
  OverlapPolicy changed_policy{};     // with the settings
  Rates rates;                        // recorded
  std::vector<std::string> left_out;  // the parts that the model leaves out, in words

  // Returns the relative error of the model for the recorded step.
  double error() const { return replayed.step_s / measured_s - 1; }
};

// Each of `settings` has the form KEY=VALUE. The key decides whether VALUE is a factor ("2x"), a
// number or a size.
//   nvme, nvme.read, nvme.write, copy, adam, compute   speed: a factor
//   nvme.latency                                       a factor
//   drives                                             the number of drives that replace one drive
//   prefetch_window                                    units that the device window holds
//   lanes                                              blocks in the optimizer pass
//   memory.host, memory.device                         sizes; the placement is planned again, and
//                                                      the policy, if the config says "auto"
//   policy                                             as optimizer.overlap, but not "auto"
// Fails with:
// - kConfig: a setting is wrong.
// - kInput: the trace has fewer than three steps, or does not describe the engine.
// - kInput: the model's error for the recorded step is larger than kWhatIfErrorMax.
// - kOutOfMemory: a budget is too small.
WhatIf what_if(const TraceAnalysis& analysis, const std::vector<std::string>& settings);

std::string text_of(const WhatIf& what_if);

}  // namespace sluice
