#include "tools/stage_table.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"
#include "engine/sharding.h"
#include "engine/window_plan.h"

namespace sluice {
namespace {

constexpr std::uint32_t kUnitsAhead = 2;  // as the placement plans its window

StageMemory memory_of(const Layout& layout, const ModelSpec& model) {
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
        window_bytes_for(training_schedule(model, 1), sizes, model.concurrent_leases + kUnitsAhead);
  return memory;
}

}  // namespace

std::array<StageMemory, 4> memory_by_stage(const Config& config, const ModelSpec& given,
                                           std::uint32_t ranks) {
  const ModelSpec model = validated(given);
  Config::Sharding sharding = config.sharding;
  std::array<StageMemory, 4> stages;
  for (std::uint32_t stage = 0; stage < stages.size(); ++stage) {
    sharding.stage = stage;
    const Layout layout(model, state_format(config), config.storage.block_elements, {},
                        shard_of(sharding, 0, ranks));
    stages[stage] = memory_of(layout, model);
  }
  return stages;
}

std::string stage_table(const Config& config, const ModelSpec& model, std::uint32_t ranks) {
  const std::uint32_t group = group_size(config.sharding, ranks);
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
