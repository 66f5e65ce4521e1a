#include "engine/planner/run_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/plan/host_memory.h"
#include "engine/plan/parameter_groups.h"
#include "engine/plan/sharding.h"

namespace sluice {
namespace {

// Every path needs room for both copies and as much again, wherever the copies come to lie.
bool drives_have_room(const Config& config, const Layout& layout, Placement placement,
                      const RunMachine& machine) {
  if (!machine.free_bytes) return true;
  add_shadows(layout, placement);
  return std::ranges::all_of(config.storage.paths, [&](const std::string& path) {
    return machine.free_bytes(path) >= 2 * placement.nvme_bytes();
  });
}

// "auto" speculates only where a second copy of the state helps and is no burden: where every block
// has one. Otherwise the other blocks' records would be read after backward instead of during it.
OverlapPolicy policy_of(const Config& config, const Layout& layout, const Placement& placement,
                        const RunMachine& machine) {
  const Config::Optimizer& optimizer = config.optimizer;
  if (optimizer.overlap != OverlapPolicy::kAuto) return optimizer.overlap;
  if (optimizer.clip_norm == 0 && optimizer.non_finite == NonFinitePolicy::kStop)
    return OverlapPolicy::kEager;
  // The copies of a durable store serve as shadows.
  const bool has_room = !config.storage.state.name.empty()
                            ? may_speculate_by_itself(config, machine.ranks)
                            : drives_have_room(config, layout, placement, machine);
  return has_room && shadows_serve_all(layout, placement) ? OverlapPolicy::kSpeculative
                                                          : OverlapPolicy::kDeferred;
}

}  // namespace

Layout plan_layout(const Config& config, const ModelSpec& model, const Shard& shard) {
  return Layout(model, state_format(config), config.storage.block_elements,
                ParameterGroups(config.optimizer, model).set_of_tensors(), shard);
}

RunPlan plan_run(const Config& config, const ModelSpec& model, const Layout& layout,
                 const RunMachine& machine) {
  check_homes(config.sharding, machine.ranks, config.placement);
  if (config.memory.unified == UnifiedMemory::kOn && !machine.device_is_host)
    throw Error(ErrorCode::kConfig,
                "memory.unified is \"on\", but the device has memory of its own, so leases need "
                "copies; set it to \"auto\"");
  if (config.memory.unified == UnifiedMemory::kOn && machine.ranks != 1)
    throw Error(ErrorCode::kConfig,
                fmt::format("memory.unified is \"on\", but {} ranks train together, which gather "
                            "parameters into copies; set it to \"auto\"",
                            machine.ranks));
  const Budgets budgets{.device_bytes = config.memory.device_bytes.value_or(machine.device_bytes),
                        .host_bytes = config.memory.host_bytes.value_or(
                            default_host_bytes(machine.host_memory_bytes))};
  RunPlan plan{.placement = plan_placement(
                   layout, model, config.placement, budgets,
                   pass_needs(config, layout, machine.ranks, machine.device_is_host))};
  plan.policy = policy_of(config, layout, plan.placement, machine);
  if (plan.policy == OverlapPolicy::kSpeculative) add_shadows(layout, plan.placement);
  if (const std::uint32_t copies = durable_copies(config, machine.ranks); copies != 0)
    add_copies(layout, copies, plan.placement);
  return plan;
}

}  // namespace sluice
