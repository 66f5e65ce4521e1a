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

// Whether nearly all of the trained state has shadows. Blocks without one are read after backward
// instead of during it. Up to an eighth of such blocks costs less than the others win.
bool shadows_serve_most(const Layout& layout, Placement placement) {
  constexpr double kServedShareLeast = 7.0 / 8;
  if (placement.gradients_leave()) return false;  // such blocks wait for the norm all the same
  add_shadows(layout, placement);
  double served = 0, all = 0;
  for (const BlockPlace& block : layout.blocks()) {
    // Pinned units, and those that ranks keep gathered, are small.
    if (layout.is_frozen(block.id) || layout.unit(block.unit).is_pinned ||
        layout.keeps_gathered(block.unit))
      continue;
    const auto elements = static_cast<double>(block.element_count);
    all += elements;
    if (placement.has_shadow(block.id)) served += elements;
  }
  return served != 0 && served >= kServedShareLeast * all;
}

// "auto" speculates only where a second copy of the state helps and is no burden.
OverlapPolicy policy_of(const Config& config, const Layout& layout, const Placement& placement,
                        const RunMachine& machine) {
  if (config.optimizer.overlap != OverlapPolicy::kAuto) return config.optimizer.overlap;
  if (may_be_eager(config)) return OverlapPolicy::kEager;
  // The copies of a durable store serve as shadows.
  const bool may_speculate =
      !config.storage.state.name.empty()
          ? may_speculate_by_itself(config, machine.ranks) && shadows_serve_all(layout, placement)
          : shadows_serve_most(layout, placement) &&
                drives_have_room(config, layout, placement, machine);
  return may_speculate ? OverlapPolicy::kSpeculative : OverlapPolicy::kDeferred;
}

}  // namespace

bool may_be_eager(const Config& config) {
  // With a moving loss scale, a step whose gradients overflow is skipped.
  return config.optimizer.clip_norm == 0 && config.optimizer.non_finite == NonFinitePolicy::kStop &&
         !config.precision.scale_moves();
}

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
  plan.placement.skips_untouched = config.optimizer.untouched == UntouchedPolicy::kSkip;
  plan.placement.is_lazy = config.optimizer.untouched == UntouchedPolicy::kLazy;
  plan.policy = policy_of(config, layout, plan.placement, machine);
  if (plan.policy == OverlapPolicy::kSpeculative) add_shadows(layout, plan.placement);
  if (const std::uint32_t copies = durable_copies(config, machine.ranks); copies != 0)
    add_copies(layout, copies, plan.placement);
  return plan;
}

}  // namespace sluice
