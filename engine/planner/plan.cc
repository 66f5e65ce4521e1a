#include <sluice/plan.h>

#include "base/float_environment.h"
#include "base/topology.h"
#include "engine/plan/host_memory.h"
#include "engine/plan/sharding.h"
#include "engine/plan/step_plans.h"
#include "engine/planner/run_plan.h"
#include "io/direct_file.h"

namespace sluice {

RunMachine this_machine(const Config& config) {
  const Config::Memory budgets = with_budgets({.device_bytes = config.memory.device_bytes},
                                              process_memory(/*device_is_host=*/true));
  return {.device_bytes = *budgets.device_bytes,
          .host_memory_bytes = memory_of_default_host(*budgets.host_bytes),
          .free_bytes = free_bytes};
}

std::uint64_t host_device_bytes(const Config& config) {
  return *with_budgets(config.memory, process_memory(/*device_is_host=*/true)).device_bytes;
}

Plan plan(const Config& config, const ModelSpec& model, const RunMachine& machine) {
  const FloatEnvironment environment;
  validate(config);
  const ModelSpec whole = validated(model);
  const Layout layout =
      plan_layout(config, whole, shard_of(config.sharding, /*rank=*/0, machine.ranks));
  const RunPlan run = plan_run(config, whole, layout, machine);
  const Placement& placement = run.placement;
  const Config::Activations& step = config.activations;
  return {.pools = placement.pools(),
          .device_bytes = placement.device_bytes(),
          .host_bytes = placement.host_bytes(),
          .nvme_bytes = placement.nvme_bytes(),
          .device_budget_bytes = placement.device_budget_bytes,
          .host_budget_bytes = placement.host_budget_bytes,
          .policy = run.policy,
          .traffic =
              StepPlans(whole, layout, placement).predict_traffic(step.micro_batches, step.order)};
}

}  // namespace sluice
