// A table of the memory and the time that a rank needs. The table covers every ZeRO stage and every
// way to offload the state. `sluice plan --matrix` prints this table, and `sluice bench matrix`
// measures the same values.
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/plan/pool_meter.h"
#include "engine/planner/planner.h"

namespace sluice {

struct MatrixRow {
  std::uint32_t stage = 0;
  std::string offload;  // "none", "optimizer to host", ...
  Config::Placement choices;
  std::string obstacle;  // why there is no plan; the members below are then unset
  OverlapPolicy policy{};
  PhaseMarks most_in_use{};        // by phase of a step
  std::uint64_t device_bytes = 0;  // of the pools
  std::uint64_t host_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  StepCost step;
  double compute_s = 0;
  RankTraffic rank_traffic;
};

// Returns one row for each combination of a stage and a way to offload. With a single rank, the
// stages do not differ, so the table has only the rows of stage 0.
std::vector<MatrixRow> plan_matrix(const PlanRequest& request);

// Returns `config` with the stage and the placement of `row`.
Config config_of_row(const Config& config, const MatrixRow& row);

std::string matrix_table(const std::vector<MatrixRow>& rows);
nlohmann::ordered_json matrix_json(const std::vector<MatrixRow>& rows);

}  // namespace sluice
