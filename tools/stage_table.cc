#include "tools/stage_table.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"
#include "engine/layout.h"
#include "engine/window_plan.h"

namespace sluice {
namespace {

constexpr std::uint32_t kUnitsAhead = 2;  // as the placement plans its window

StageMemory memory_of(const Layout& layout, const ModelSpec& model, bool shares_parameters) {
  StageMemory memory;
  std::vector<std::uint64_t> sizes;
  for (const UnitPlace& unit : layout.units()) {
    const bool is_whole = !shares_parameters || layout.keeps_gathered(unit.id);
    sizes.push_back(is_whole ? 0 : layout.unit_parameter_bytes(unit.id));
    memory.parameter_bytes += is_whole ? layout.unit_parameter_bytes(unit.id)
                                       : layout.shard_parameter_bytes(unit.id);
    memory.gradient_bytes += layout.set_gradient_bytes(unit.id);
  }
  for (const BlockPlace& block : layout.blocks())
    memory.optimizer_bytes += layout.record_bytes(block.id);
  if (shares_parameters)
    memory.window_bytes =
        window_bytes_for(training_schedule(model, 1), sizes, model.concurrent_leases + kUnitsAhead);
  return memory;
}

}  // namespace

std::uint32_t group_of(const Config& config, std::uint32_t ranks) {
  const Config::Sharding& sharding = config.sharding;
  if (sharding.group_is_node && ranks > 1)
    throw Error(ErrorCode::kConfig,
                "sharding.group is \"node\": a plan does not know how many ranks a host will have; "
                "set it to their number");
  const std::uint32_t group = sharding.group_ranks == 0 ? ranks : sharding.group_ranks;
  if (ranks > 1 && ranks % group != 0)
    throw Error(ErrorCode::kConfig, fmt::format("sharding.group is {}, but {} ranks are not a "
                                                "multiple of that; choose a divisor",
                                                group, ranks));
  return ranks == 1 ? 1 : group;
}

std::array<StageMemory, 4> memory_by_stage(const Config& config, const ModelSpec& given,
                                           std::uint32_t ranks) {
  const ModelSpec model = validated(given);
  const std::uint32_t group = group_of(config, ranks);
  std::array<StageMemory, 4> stages;
  for (std::uint32_t stage = 0; stage < stages.size(); ++stage) {
    const Shard shard{.count = stage == 0 ? 1 : group,
                      .keeps_all_gradients = stage < 2,
                      .keeps_all_parameters = stage < 3,
                      .keep_gathered_bytes = config.sharding.keep_gathered_bytes};
    const Layout layout(model, state_format(config), config.storage.block_elements, {}, shard);
    stages[stage] = memory_of(layout, model, stage == 3 && group > 1);
  }
  return stages;
}

std::string stage_table(const Config& config, const ModelSpec& model, std::uint32_t ranks) {
  const std::uint32_t group = group_of(config, ranks);
  std::string table = fmt::format(
      "\none of {} ranks{} keeps, whatever the tier:\n{:<7}{:>12}{:>12}"
      "{:>12}{:>12}{:>12}\n",
      ranks, group == ranks ? "" : fmt::format(" in groups of {}", group), "stage", "parameters",
      "window", "gradients", "optimizer", "sum");
  std::uint32_t stage = 0;
  for (const StageMemory& memory : memory_by_stage(config, model, ranks)) {
    table += fmt::format("{:<7}{:>12}{:>12}{:>12}{:>12}{:>12}\n", stage++,
                         format_bytes(memory.parameter_bytes), format_bytes(memory.window_bytes),
                         format_bytes(memory.gradient_bytes), format_bytes(memory.optimizer_bytes),
                         format_bytes(memory.parameter_bytes + memory.window_bytes +
                                      memory.gradient_bytes + memory.optimizer_bytes));
  }
  return table;
}

}  // namespace sluice
