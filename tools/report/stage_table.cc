#include "tools/report/stage_table.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/sharding.h"
#include "engine/plan/window_plan.h"
#include "engine/planner/phase_memory.h"

namespace sluice {
namespace {

// With the least window; how much more there is, the placement says.
StageMemory memory_at_rest(const Layout& layout, const ModelSpec& model) {
  const bool shares_parameters = layout.shard().count > 1 && !layout.shard().keeps_all_parameters;
  StageMemory memory;
  std::vector<std::uint64_t> sizes;
  for (const UnitPlace& unit : layout.units()) {
    const bool is_whole = !shares_parameters || layout.keeps_gathered(unit.id);
    sizes.push_back(is_whole ? 0 : layout.unit_parameter_bytes(unit.id));
    memory.parameter_bytes +=
        is_whole ? layout.unit_parameter_bytes(unit.id) : layout.shard_parameter_bytes(unit.id);
    memory.gradient_bytes += layout.set_gradient_bytes(unit.id);
  }
  for (const BlockPlace& block : layout.blocks())
    memory.optimizer_bytes += layout.record_bytes(block.id);
  if (shares_parameters)
    memory.window_bytes =
        least_window_bytes(training_schedule(model, 1), sizes, model.concurrent_leases);
  return memory;
}

// A home that the stage does not have becomes the planner's choice.
Config::Placement homes_of_stage(const PlanRequest& request, std::string& left_to_auto) {
  Config::Placement choices = request.config.placement;
  const auto require = [&](TierChoice Config::Placement::*home, const char* name) {
    Config::Placement alone;
    alone.*home = choices.*home;
    try {
      check_homes(request.config.sharding, request.machine.ranks, alone);
    } catch (const Error&) {
      choices.*home = TierChoice::kAuto;
      left_to_auto += (left_to_auto.empty() ? "" : ", ") + std::string(name);
    }
  };
  require(&Config::Placement::parameters, "parameters");
  require(&Config::Placement::optimizer, "optimizer");
  require(&Config::Placement::gradients, "gradients");
  return choices;
}

std::string phase_rows(std::uint32_t stage, const StageMemory& memory, bool has_activations) {
  if (!memory.obstacle.empty()) return fmt::format("{:<7}{}\n", stage, in_short(memory.obstacle));
  std::string rows;
  for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
    const PoolMarks& marks = memory.most_in_use[phase];
    rows += fmt::format("{:<7}{:<10}", phase == 0 ? std::to_string(stage) : "",
                        name_of(static_cast<StepPhase>(phase)));
    for (std::size_t kind = 0; kind < kMemoryKinds; ++kind) {
      if (static_cast<MemoryKind>(kind) == MemoryKind::kActivations && !has_activations) continue;
      rows += fmt::format("{:>11}", format_bytes(marks.kind_bytes[kind]));
    }
    rows += " |";
    for (const std::uint64_t bytes : marks.tier_bytes)
      rows += fmt::format("{:>11}", format_bytes(bytes));
    rows += '\n';
  }
  if (!memory.left_to_auto.empty())
    rows += fmt::format("{:<7}stage {} does not have the config's home of {}: planned as auto\n",
                        "", stage, memory.left_to_auto);
  return rows;
}

}  // namespace

std::array<StageMemory, 4> memory_by_stage(const PlanRequest& request) {
  const ModelSpec model = validated(request.model);
  PlanRequest own = request;
  std::array<StageMemory, 4> stages;
  for (std::uint32_t stage = 0; stage < stages.size(); ++stage) {
    own.config.sharding.stage = stage;
    const Layout layout =
        plan_layout(own.config, model, shard_of(own.config.sharding, 0, own.machine.ranks));
    StageMemory& memory = stages[stage] = memory_at_rest(layout, model);
    Config config = own.config;
    config.placement = homes_of_stage(own, memory.left_to_auto);
    const std::optional<RunPlan> planned =
        try_plan(config, model, layout, own.machine, memory.obstacle);
    if (!planned) continue;
    if (memory.window_bytes != 0) memory.window_bytes = planned->placement.window_bytes;
    memory.most_in_use = predicted_marks({.model = model,
                                          .layout = layout,
                                          .placement = planned->placement,
                                          .policy = planned->policy,
                                          .micro_batches = own.micro_batches,
                                          .order = own.order,
                                          .ranks = own.machine.ranks});
  }
  return stages;
}

std::string stage_table(const PlanRequest& request) {
  const std::array<StageMemory, 4> stages = memory_by_stage(request);
  const std::uint32_t group = group_size(request.config.sharding, request.machine.ranks);
  std::string table = fmt::format(
      "\none of {} ranks{} keeps, whatever the tier:\n{:<7}{:>12}{:>12}{:>12}{:>12}{:>12}\n",
      request.machine.ranks,
      group == request.machine.ranks ? "" : fmt::format(" in groups of {}", group), "stage",
      "parameters", "window", "gradients", "optimizer", "sum");
  std::uint32_t stage = 0;
  for (const StageMemory& memory : stages) {
    table += fmt::format("{:<7}{:>12}{:>12}{:>12}{:>12}{:>12}\n", stage++,
                         format_bytes(memory.parameter_bytes), format_bytes(memory.window_bytes),
                         format_bytes(memory.gradient_bytes), format_bytes(memory.optimizer_bytes),
                         format_bytes(memory.parameter_bytes + memory.window_bytes +
                                      memory.gradient_bytes + memory.optimizer_bytes));
  }
  const bool has_activations = request.config.activations.home != ActivationHome::kKeep;
  table += fmt::format(
      "\nand has in use at most, with the config's homes, by kind and by tier:\n"
      "{:<7}{:<10}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}{} |{:>11}{:>11}{:>11}\n",
      "stage", "phase", "parameters", "window", "gradients", "slots", "optimizer", "buffers",
      has_activations ? fmt::format("{:>11}", "activat.") : "", "device", "host", "nvme");
  for (stage = 0; stage < stages.size(); ++stage)
    table += phase_rows(stage, stages[stage], has_activations);
  return table;
}

}  // namespace sluice
