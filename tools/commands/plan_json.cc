#include "tools/commands/plan_json.h"

#include <string>

#include "tools/report/rank_memory.h"

namespace sluice {
namespace {

nlohmann::ordered_json json_of(const StepCost& cost) {
  nlohmann::ordered_json busy = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < kResourceCount; ++i)
    busy[std::string(name_of(static_cast<Resource>(i)))] = cost.busy_s[i];
  return {{"step_s", cost.step_s},
          {"binds", name_of(cost.scarcest())},
          {"busy_s", busy},
          {"nvme_read_bytes", cost.traffic.nvme_read_bytes},
          {"nvme_write_bytes", cost.traffic.nvme_write_bytes},
          {"gradient_spill_bytes", cost.traffic.gradient_spill_bytes},
          {"activation_out_bytes", cost.traffic.activation_out_bytes},
          {"activation_in_bytes", cost.traffic.activation_in_bytes}};
}

}  // namespace

nlohmann::ordered_json json_of(const PlannedPlacement& planned) {
  nlohmann::ordered_json root = {{"name", planned.name}, {"fits", planned.obstacle.empty()}};
  if (!planned.obstacle.empty()) {
    root["obstacle"] = planned.obstacle;
    return root;
  }
  root["device_bytes"] = planned.placement.device_bytes();
  root["host_bytes"] = planned.placement.host_bytes();
  root["nvme_bytes"] = planned.placement.nvme_bytes();
  root["compute_s"] = planned.compute_s;
  root["policy"] = name_of(planned.policy);
  root["step"] = json_of(planned.step);
  if (const RankTraffic& traffic = planned.rank_traffic; traffic.reduced_bytes != 0)
    root["collectives"] = {{"gathered_bytes", traffic.gathered_bytes},
                           {"reduced_bytes", traffic.reduced_bytes},
                           {"crossed_bytes", traffic.crossed_bytes}};
  if (!planned.policies.empty()) root["t_min_s"] = planned.least.step_s;
  for (const PlannedChange& change : planned.policies)
    root["policies"][std::string(name_of(change.policy))] = json_of(change.step);
  if (const auto& other = planned.on_other_processor)
    root["on_other_processor"] = json_of(other->step);
  for (const Pool& pool : planned.placement.pools())
    root["pools"].push_back(
        {{"tier", name_of(pool.tier)}, {"pool", pool.name}, {"size_bytes", pool.size_bytes}});
  return root;
}

nlohmann::ordered_json json_of(const StageMemory& stage) {
  nlohmann::ordered_json root = {{"parameter_bytes", stage.parameter_bytes},
                                 {"window_bytes", stage.window_bytes},
                                 {"gradient_bytes", stage.gradient_bytes},
                                 {"optimizer_bytes", stage.optimizer_bytes},
                                 {"fits", stage.obstacle.empty()}};
  if (stage.obstacle.empty()) {
    root["most_in_use_bytes"] = json_of(stage.most_in_use);
  } else {
    root["obstacle"] = stage.obstacle;
  }
  return root;
}

}  // namespace sluice
