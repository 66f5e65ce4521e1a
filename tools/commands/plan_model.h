// The model that `sluice plan` uses for its plan. The model comes from one of three sources: the
// GPT in the config, a config.json (--model), or a number of parameters. With --parameters, the
// parameters are divided into equal units (--layers).
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/model_spec.h>
#include "tools/commands/plan_command.h"
#include "tools/gpt/train/train_config.h"
#include "tools/report/machine_presets.h"
#include "tools/zoo/model_zoo.h"

namespace sluice {

// A plan assumes that matrix products reach this share of the rate in the GPU's data sheet.
inline constexpr double kReachedShare = 0.4;
// The part of a GPU's memory that the driver and the libraries occupy.
inline constexpr std::uint64_t kGpuContextBytes = std::uint64_t{1} << 30;

// The most bytes of activations that a plan counts: these fit nowhere, and sums over all units can
// hold them.
inline constexpr std::uint64_t kPlannedBytesMax = std::uint64_t{1} << 46;

struct PlanModel {
  ModelSpec spec;
  std::vector<double> forward_flops;   // operations of one micro-batch, for each unit
  std::uint64_t activation_bytes = 0;  // the activations that the application keeps
  double tokens = 0;                   // per step and rank
  std::string description;             // a line about --model; empty without --model
  double active_parameters = 0;        // the parameters of --model that a token uses
  std::vector<std::string> tied;       // with --model: all names of the tied tensor
};

// Returns the units and tensors of `model` as JSON, for the option --tensors.
std::string tensors_json(const PlanModel& model);

// Fails with kInput if a file cannot be read. Fails with kConfig if the model or an option is
// wrong.
PlanModel plan_model(const TrainConfig& config, const PlanOptions& options, bool is_on_host);

}  // namespace sluice
