#include "tools/report/plan_matrix.h"

#include <array>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/at_once.h"
#include "engine/planner/phase_memory.h"
#include "engine/planner/plan_evaluation.h"
#include "tools/report/rank_memory.h"

namespace sluice {
namespace {

constexpr std::uint32_t kStages = 4;

struct Offload {
  const char* name;
  TierChoice parameters;
  TierChoice optimizer;
};

constexpr std::array<Offload, 5> kOffloads{
    {{"none", TierChoice::kDevice, TierChoice::kDevice},
     {"optimizer to host", TierChoice::kDevice, TierChoice::kHost},
     {"optimizer to nvme", TierChoice::kDevice, TierChoice::kNvme},
     {"all to host", TierChoice::kHost, TierChoice::kHost},
     {"all to nvme", TierChoice::kNvme, TierChoice::kNvme}}};

MatrixRow row_of(const PlanRequest& request, const PlanEvaluation& evaluation,
                 const Offload& offload) {
  MatrixRow row;
  row.stage = request.config.sharding.stage;
  row.offload = offload.name;
  row.choices = request.config.placement;
  row.choices.parameters = offload.parameters;
  row.choices.optimizer = offload.optimizer;
  const PlannedPlacement planned = evaluation.place(offload.name, row.choices);
  row.obstacle = planned.obstacle;
  if (!row.obstacle.empty()) return row;
  row.policy = planned.policy;
  row.device_bytes = planned.placement.device_bytes();
  row.host_bytes = planned.placement.host_bytes();
  row.nvme_bytes = planned.placement.nvme_bytes();
  row.compute_s = planned.compute_s;
  row.rank_traffic = planned.rank_traffic;
  row.step = evaluation.step_of(planned.placement, planned.policy, evaluation.rates());
  row.most_in_use = predicted_marks({.model = evaluation.model(),
                                     .layout = evaluation.layout(),
                                     .placement = planned.placement,
                                     .policy = planned.policy,
                                     .micro_batches = request.micro_batches,
                                     .order = request.order,
                                     .ranks = request.machine.ranks});
  return row;
}

}  // namespace

std::vector<MatrixRow> plan_matrix(const PlanRequest& request) {
  const std::uint32_t stages = request.machine.ranks == 1 ? 1 : kStages;
  std::vector<MatrixRow> rows(stages * kOffloads.size());
  std::vector<PlanRequest> requests(stages, request);
  std::vector<PlanEvaluation> evaluations;
  evaluations.reserve(stages);
  for (std::uint32_t stage = 0; stage < stages; ++stage) {
    requests[stage].config.sharding.stage = stage;
    evaluations.emplace_back(requests[stage]);
  }
  for_each_at_once(rows.size(), [&](std::size_t i) {
    const std::size_t stage = i / kOffloads.size();
    rows[i] = row_of(requests[stage], evaluations[stage], kOffloads[i % kOffloads.size()]);
  });
  return rows;
}

Config config_of_row(const Config& config, const MatrixRow& row) {
  Config own = config;
  own.sharding.stage = row.stage;
  own.placement = row.choices;
  return own;
}

std::string matrix_table(const std::vector<MatrixRow>& rows) {
  std::string table =
      fmt::format("\n{:<6}{:<19}{:<10}{:>9}{:>9}{:>9}{:>9}{:>9}  {}\n", "stage", "offload", "phase",
                  "device", "host", "nvme", "step s", "links s", "what binds");
  for (const MatrixRow& row : rows) {
    const std::string head = fmt::format("{:<6}{:<19}", row.stage, row.offload);
    if (!row.obstacle.empty()) {
      table += head + in_short(row.obstacle) + '\n';
      continue;
    }
    for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
      const auto& bytes = row.most_in_use[phase].tier_bytes;
      table += fmt::format("{:<25}{:<10}{:>9}{:>9}{:>9}", phase == 0 ? head : "",
                           name_of(static_cast<StepPhase>(phase)), format_bytes(bytes[0]),
                           format_bytes(bytes[1]), format_bytes(bytes[2]));
      if (phase == 0)
        table += fmt::format("{:>9.4g}{:>9.3g}  {}", row.step.step_s,
                             row.step.busy(Resource::kLinks), name_of(row.step.scarcest()));
      table += '\n';
    }
  }
  return table;
}

nlohmann::ordered_json matrix_json(const std::vector<MatrixRow>& rows) {
  auto list = nlohmann::ordered_json::array();
  for (const MatrixRow& row : rows) {
    nlohmann::ordered_json entry = {
        {"stage", row.stage}, {"offload", row.offload}, {"fits", row.obstacle.empty()}};
    if (row.obstacle.empty()) {
      entry["most_in_use_bytes"] = json_of(row.most_in_use);
      entry["step_s"] = row.step.step_s;
      entry["compute_s"] = row.compute_s;
      entry["links_s"] = row.step.busy(Resource::kLinks);
      entry["binds"] = name_of(row.step.scarcest());
    } else {
      entry["obstacle"] = row.obstacle;
    }
    list.push_back(std::move(entry));
  }
  return list;
}

}  // namespace sluice
