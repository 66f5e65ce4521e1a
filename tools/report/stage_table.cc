#include "tools/report/stage_table.h"

#include <algorithm>
#include <span>

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

// One row for each stage and phase, in columns of `names`; `bytes_of` gives their numbers. Lines of
// at most 80 characters.
template <class BytesOf>
std::string phase_table(const std::array<StageMemory, 4>& stages,
                        std::span<const char* const> names, const BytesOf& bytes_of) {
  std::string table = fmt::format("\n{:<6}{:<10}", "stage", "phase");
  for (const char* name : names) table += fmt::format("{:>9}", name);
  table += '\n';
  for (std::size_t stage = 0; stage < stages.size(); ++stage) {
    if (!stages[stage].obstacle.empty()) {
      table += fmt::format("{:<6}{}\n", stage, in_short(stages[stage].obstacle));
      continue;
    }
    for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
      table += fmt::format("{:<6}{:<10}", phase == 0 ? std::to_string(stage) : "",
                           name_of(static_cast<StepPhase>(phase)));
      const auto& bytes = bytes_of(stages[stage].most_in_use[phase]);
      for (std::size_t i = 0; i < names.size(); ++i)
        table += fmt::format("{:>9}", format_bytes(bytes[i]));
      table += '\n';
    }
  }
  return table;
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
  table += "\nand has in use at most, with the config's homes, by kind and by tier:\n";
  const bool has_activations = request.config.activations.home != ActivationHome::kKeep;
  constexpr std::array kKinds{"params", "window",  "grads",   "slots",
                              "optim.", "buffers", "activat."};
  static_assert(kKinds.size() == kMemoryKinds);
  const std::span kinds(kKinds.data(), kKinds.size() - (has_activations ? 0 : 1));
  table += phase_table(stages, kinds, [](const PoolMarks& marks) { return marks.kind_bytes; });
  constexpr std::array kTierNames{"device", "host", "nvme"};
  table += phase_table(stages, kTierNames, [](const PoolMarks& marks) { return marks.tier_bytes; });
  for (stage = 0; stage < stages.size(); ++stage) {
    if (!stages[stage].left_to_auto.empty())
      table += fmt::format("stage {} does not have the config's home of {}: planned as auto\n",
                           stage, stages[stage].left_to_auto);
  }
  return table;
}

}  // namespace sluice
