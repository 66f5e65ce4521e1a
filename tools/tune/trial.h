// Runs a config for a few steps and measures them. The engine, the trainer and the data are those
// of `sluice train`. There are no outputs, evaluations or checkpoints. A durable store is left
// alone. The trial keeps its state in scratch files, which vanish.
//
// Thread rule: one trial at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "engine/bound/step_cost.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

struct Trial {
  std::vector<double> step_s;  // without the first step, which touches memory for the first time
  double began_s = 0;          // before the first step: making the engine, setting the state
  Rates rates;                 // measured; 0 where a step has nothing to measure. Has unit times.
  std::uint64_t device_budget_bytes = 0;

  double median_s() const;
};

// The function runs one step that is not measured, and then `steps` steps that are measured.
// `progress` is called before each step.
// Fails with the errors of a training run.
Trial run_trial(TrainConfig config, unsigned steps,
                const std::function<void(unsigned step)>& progress);

}  // namespace sluice
