// `sluice plan` predicts the memory, the storage and the time that a run will need. The command
// does not start the run.
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
  bool matrix = false;  // also print memory and time by stage and offload
  // The path of a config.json, or of a folder that contains a config.json. The model in this file
  // replaces the config's model. If `model` is empty, the config's model is used.
  std::string model;
  std::optional<std::uint64_t> sequence;  // only with `model`: tokens per sequence
  // The plan assumes the GPU with this name. If the name is empty, the plan follows the config.
  std::string gpu;
  // If `host_memory` is not empty, `host_memory` replaces the config's memory.host. If `nodes` is
  // given, `host_memory` is the memory of one host.
  std::string host_memory;
  std::string drive;                 // a name, or "name:count"; empty = none
  std::string drive_space;           // of all drives; empty = as `drive`; both empty = no limit
  std::optional<double> parameters;  // of the whole model; replaces the config's model
  std::uint32_t layers = 1;          // with `parameters`: the number of equal units
  std::optional<double> tokens;      // per step and rank; empty = from the config's batch
  std::string bytes_written_rating;  // for all drives together, such as "1200TB"; empty = none
  PlanRateOptions rates;
  bool as_deepspeed = false;  // also print what DeepSpeed's estimators say
  // The number of hosts on which the ranks run. If `nodes` is given, the options for memory, drives
  // and rates describe one host, and the host's ranks share these resources. If `nodes` is not
  // given, the options describe the resources of one rank.
  std::optional<std::uint32_t> nodes;
  std::string output_file;  // a config with the budgets of the plan
  std::string json_file;
  std::string plot_file;
  std::string tensors_file;
};

// Prints the plan. Returns kExitResource if the config's placement does not fit the config's
// budgets.
// Fails with kConfig if the config or an option is wrong. Fails with kInput if a file cannot be
// read or written.
int run_plan(const PlanOptions& options);

}  // namespace sluice
