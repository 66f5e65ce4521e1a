// The model that `sluice plan` reckons with: the config's GPT, one of --parameters in --layers that
// are all alike, or one of a config.json (--model); and the GPU that it is planned for.
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
#include "tools/zoo/model_zoo.h"

namespace sluice {

// A GPU by name. Memory and dense bf16 rates with fp32 sums are NVIDIA's data sheets'.
struct GpuPreset {
  const char* name;
  std::uint64_t memory_bytes;
  double flops;
};

// Fails with: kConfig for a name that is not known, with those that are.
const GpuPreset& gpu_preset(const std::string& name);
// The share of a data sheet's rate that products of matrices reach, as plans assume.
inline constexpr double kReachedShare = 0.4;
// The part of a GPU's memory that the driver and the libraries keep.
inline constexpr std::uint64_t kGpuContextBytes = std::uint64_t{1} << 30;

struct PlanModel {
  ModelSpec spec;
  std::vector<double> forward_flops;   // of a micro-batch, by unit
  std::uint64_t activation_bytes = 0;  // that the application keeps
  double tokens = 0;                   // of a step and rank
  std::string description;             // of --model: a line; else empty
};

// Fails with: kInput, kConfig.
PlanModel plan_model(const TrainConfig& config, const PlanOptions& options, bool is_on_host);

}  // namespace sluice
