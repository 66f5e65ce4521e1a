// `sluice plan`: what a run will need and cost, before it starts.
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
  DeepspeedValues deepspeed;  // of a DeepSpeed file
  std::uint32_t ranks = 1;
  bool stages = false;  // also what each ZeRO stage leaves on a rank
  std::string model;  // a config.json, or a folder with one, instead of the config's; empty = none
  std::optional<std::uint64_t> sequence;  // with `model`: tokens of a sequence
  std::string gpu;                        // to plan for, by name; empty = as the config says
  std::string host_memory;                // instead of memory.host; empty = as the config says
  std::optional<double> parameters;       // of the whole model, instead of the config's
  std::uint32_t layers = 1;               // with `parameters`: units, all alike
  std::optional<double> tokens;           // of a step and rank; else as the config's batch
  std::string bytes_written_rating;       // of the drives together: "1200TB"; empty = not asked
  PlanRateOptions rates;
  std::string json_file;
};

// Prints the plan. Returns kExitResource when the config's own placement does not fit its budgets.
// Fails with: kConfig, kInput.
int run_plan(const PlanOptions& options);

}  // namespace sluice
