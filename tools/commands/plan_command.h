// `sluice plan` says what a run will need and cost, before the run starts.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/deepspeed/deepspeed_import.h"
#include "tools/report/plan_rates.h"

namespace sluice {

struct PlanOptions {
  std::string config_file;
  std::vector<std::string> assignments;
  DeepspeedValues deepspeed;  // used for a DeepSpeed file
  std::uint32_t ranks = 1;
  bool stages = false;  // also print the memory of a rank under each ZeRO stage
  bool matrix = false;  // and memory and time by stage and offload
  // A config.json, or a folder that has one, which replaces the config's model; empty = none.
  std::string model;
  std::optional<std::uint64_t> sequence;  // with `model`: tokens of a sequence
  // The name of the GPU to plan for; empty = as in the config.
  std::string gpu;
  // A value that replaces memory.host; empty = as in the config. With `nodes`, the value is the
  // memory of a host.
  std::string host_memory;
  std::string drive;                 // a name, or "name:count"; empty = none
  std::string drive_space;           // of all drives together; empty = of `drive`, or unlimited
  std::optional<double> parameters;  // of the whole model; replaces the config's model
  std::uint32_t layers = 1;          // with `parameters`: the number of equal units
  std::optional<double> tokens;      // of a step and rank; otherwise from the config's batch
  std::string bytes_written_rating;  // of all drives together, such as "1200TB"; empty = none
  PlanRateOptions rates;
  bool as_deepspeed = false;  // also print what DeepSpeed's estimators say
  // The number of hosts that the ranks are on. If `nodes` is given, memory, drives and rates are
  // those of a host, and the host's ranks share them. If `nodes` is not given, memory, drives and
  // rates are those of a rank.
  std::optional<std::uint32_t> nodes;
  std::string json_file;
  std::string plot_file;
  std::string tensors_file;
};

// The function prints the plan. Returns kExitResource if the config's own placement does not fit
// its budgets.
// Fails with kConfig or kInput.
int run_plan(const PlanOptions& options);

}  // namespace sluice
