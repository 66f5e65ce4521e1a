// The model of a training run under changed settings. The model makes the same plan as the engine,
// and simulates the plan's step at measured rates. The model tells tune_search() how long a step
// would take.
//
// Thread rule: the call of learn() precedes all other calls. Any thread may call the const
// functions.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <sluice/config_document.h>
#include "engine/plan/host_memory.h"
#include "tools/gpt/train/train_config.h"
#include "tools/report/plan_rates.h"
#include "tools/tune/calibration.h"
#include "tools/tune/trial.h"
#include "tools/tune/tune_search.h"

namespace sluice {

class RunModel {
 public:
  // The constructor takes the values that `given` sets. The free memory of the host is looked up
  // once, so that all predictions see the same machine. `gpu_file` has the figures of a GPU, as for
  // plan_rates(), or is empty.
  // Fails with kConfig if `sluice train` would refuse the config, and as plan_rates() does.
  RunModel(const ConfigDocument& given, MachineCalibration machine, const std::string& gpu_file);

  // Takes over the times of computation and the rates that a run of `config` has measured.
  void learn(const Trial& trial, const TrainConfig& config);
  // From now on, computation is assumed to reach `flops` per second, for predictions without a run.
  void assume(double flops) { flops_ = flops; }
  // The rate of a GPU's computation: from its figures, or assumed.
  double gpu_flops() const { return stated_.flops; }

  const TrainConfig& given() const { return given_; }
  bool is_on_host() const { return is_on_host_; }
  // Fails with kConfig if the settings do not fit together.
  TrainConfig config_with(const TuneSettings& settings) const;
  // The text of a config file. The text has the given values, with `settings` in their place.
  std::string text_with(const TuneSettings& settings) const;

  TunePrediction predict(const TuneSettings& settings) const;

 private:
  TunePrediction predicted(TrainConfig config) const;
  Rates rates_for(const TrainConfig& config) const;

  std::string text_;  // the given values as JSON
  TrainConfig given_;
  MachineCalibration machine_;
  bool is_on_host_ = true;
  PlanRates stated_;  // for what neither the calibration nor a run has measured
  MemoryRoom room_;
  double flops_ = 0;  // 0: the measured times
  Rates measured_;    // 0 where nothing was measured
  TrainConfig measured_config_;
  std::uint64_t device_bytes_ = 0;  // of a GPU, if it is known
};

}  // namespace sluice
