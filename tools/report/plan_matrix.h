// The memory and time of a rank for every ZeRO stage and every way to offload the state. `sluice
// plan --matrix` prints this table, and `sluice bench matrix` measures it. Pure; any thread.
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
  std::string obstacle;  // why there is no such plan; the members below are unset then
  OverlapPolicy policy{};
  PhaseMarks most_in_use{};        // by phase of a step
  std::uint64_t device_bytes = 0;  // of the pools
  std::uint64_t host_bytes = 0;
  std::uint64_t nvme_bytes = 0;
  StepCost step;
  double compute_s = 0;
  RankTraffic rank_traffic;
};

// The table has one row for each stage and each way to offload. One rank has no stages, so its rows
// are those of stage 0.
std::vector<MatrixRow> plan_matrix(const PlanRequest& request);

// The config of `row`, for an engine.
Config config_of_row(const Config& config, const MatrixRow& row);

std::string matrix_table(const std::vector<MatrixRow>& rows);
nlohmann::ordered_json matrix_json(const std::vector<MatrixRow>& rows);

}  // namespace sluice
