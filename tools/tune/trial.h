// A trial runs a config for a few steps, and measures these steps. The trial has the same engine,
// trainer and data as `sluice train`. A trial writes no outputs, makes no evaluations or
// checkpoints, and does not touch a durable store. The training state on storage is in scratch
// files, which disappear at the end.
//
// Thread rule: only one trial may run at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/bound/step_cost.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

struct Trial {
  std::vector<double> step_s;  // without the first step, which touches memory for the first time
  double began_s = 0;          // time for making the engine and setting the state
  Rates rates;                 // measured rates and unit times; 0 = nothing was measured
  std::uint64_t device_budget_bytes = 0;

  double median_s() const;
};

// Runs one step that is not measured, and then `steps` steps that are measured. Calls `progress`
// before each step.
// Fails with the errors of a training run.
Trial run_trial(TrainConfig config, unsigned steps,
                const std::function<void(unsigned step)>& progress);

}  // namespace sluice
