// The model predicts a training run under changed settings. The model makes the same plan that the
// engine would make, and simulates a step of this plan at measured rates. tune_search() asks the
// model for the time of a step.
//
// Thread rule: learn() must be called before all other functions. Any thread may call the const
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
  // `given` is the config that the settings change. The constructor reads the amount of free host
  // memory once, so that all predictions assume the same machine. `gpu_file` names a file with a
  // GPU's figures, in the format that plan_rates() reads. `gpu_file` is empty if there is no such
  // file.
  // Fails with kConfig if `sluice train` would refuse the config, and with the errors of
  // plan_rates().
  RunModel(const ConfigDocument& given, MachineCalibration machine, const std::string& gpu_file);

  // `trial` is a run of `config`. Later predictions use the computation times and the rates that
  // this run has measured.
  void learn(const Trial& trial, const TrainConfig& config);
  // Later predictions assume that computation reaches `flops` operations per second. This rate is
  // needed only for predictions before the first trial run.
  void assume(double flops) { flops_ = flops; }
  // The rate of computation on a GPU. The rate comes from the GPU's figures, or is an assumption.
  double gpu_flops() const { return stated_.flops; }

  const TrainConfig& given() const { return given_; }
  bool is_on_host() const { return is_on_host_; }
  // Returns the given config with the changes in `settings`.
  // Fails with kConfig if the settings contradict each other.
  TrainConfig config_with(const TuneSettings& settings) const;
  // Returns the text of a config file. In this file, the keys of `settings` have the values from
  // `settings`. All other keys have the values of the given config.
  std::string text_with(const TuneSettings& settings) const;

  TunePrediction predict(const TuneSettings& settings) const;

 private:
  TunePrediction predicted(TrainConfig config) const;
  Rates rates_for(const TrainConfig& config) const;

  std::string text_;  // the given values as JSON
  TrainConfig given_;
  MachineCalibration machine_;
  bool is_on_host_ = true;
  PlanRates stated_;  // rates that neither the calibration nor a run measured
  MemoryRoom room_;
  double flops_ = 0;  // 0: use the measured times
  Rates measured_;    // 0 where nothing was measured
  TrainConfig measured_config_;
  std::uint64_t device_bytes_ = 0;  // of a GPU, if it is known
};

}  // namespace sluice
