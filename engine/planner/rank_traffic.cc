#include "engine/planner/rank_traffic.h"

#include <vector>

#include "engine/plan/schedule.h"
#include "engine/plan/sharding.h"
#include "engine/plan/window_plan.h"

namespace sluice {
namespace {

// How often each unit's parameters are gathered in a step. Parameters that ranks share are gathered
// for every fetch into the window. Whole parameters are gathered once, after their update.
std::vector<std::uint64_t> gathers(const ActivationShape& step, const Layout& layout,
                                   const Placement& placement) {
  std::vector<std::uint64_t> counts(layout.units().size(), 0);
  if (layout.shard().count == 1) return counts;
  const Schedule schedule = training_schedule(step.model, step.micro_batches, step.order);
  const WindowPlan window = plan_window(schedule, window_unit_bytes(layout, placement),
                                        placement.window_bytes, step.model.concurrent_leases);
  for (std::size_t use = 0; use < schedule.size(); ++use)
    if (window.uses[use].fetch) ++counts[index_of(schedule[use].unit)];
  for (const UnitPlace& unit : layout.units())
    if (!unit.is_sharded) counts[index_of(unit.id)] = unit.is_frozen || unit.is_local ? 0 : 1;
  return counts;
}

// How often each unit's gradients are added up over the ranks in a step.
std::vector<std::uint64_t> reductions(const ActivationShape& step, const Layout& layout) {
  std::vector<std::uint64_t> counts(layout.units().size(), 0);
  const bool each_use = reduces_each_use(layout.shard(), step.micro_batches, step.order);
  for (const ScheduledUse& use : training_schedule(step.model, step.micro_batches, step.order)) {
    if (use.pass == Pass::kForward || layout.unit(use.unit).is_frozen) continue;
    if (each_use || use.final_gradient) ++counts[index_of(use.unit)];
  }
  return counts;
}

}  // namespace

RankTraffic predict_rank_traffic(const Config::Sharding& sharding, std::uint32_t ranks,
                                 const ActivationShape& step, const Layout& layout,
                                 const Placement& placement) {
  RankTraffic traffic;
  if (ranks == 1) return traffic;
  const std::uint32_t first = first_level_ranks(sharding, ranks);
  const bool has_groups = group_size(sharding, ranks) < ranks;
  const StateFormat& format = layout.format();
  const std::vector<std::uint64_t> gathered = gathers(step, layout, placement);
  const std::vector<std::uint64_t> reduced = reductions(step, layout);
  for (const UnitPlace& unit : layout.units()) {
    const std::size_t i = index_of(unit.id);
    const std::uint64_t gradient_bytes = unit.payload_elements * format.gradient_bytes();
    traffic.gathered_bytes += gathered[i] * unit.payload_elements * format.parameter_bytes();
    traffic.reduced_bytes += reduced[i] * gradient_bytes;
    if (layout.shard().count == 1) traffic.gathered_bytes += reduced[i] * gradient_bytes;
    const std::uint64_t crossing_bytes =
        sizeof(float) + (has_groups ? format.gradient_bytes() : 0);  // per element
    if (first > 1)
      traffic.crossed_bytes += reduced[i] * (unit.payload_elements * crossing_bytes / first);
  }
  if (first > 1 && !has_groups) traffic.crossed_bytes += traffic.gathered_bytes / first;
  return traffic;
}

double link_seconds(const RankTraffic& traffic, const Config::Sharding& sharding,
                    std::uint32_t ranks, double link_bytes_per_second) {
  if (ranks == 1 || link_bytes_per_second == 0) return 0;
  const std::uint32_t first = first_level_ranks(sharding, ranks);
  const auto share = [](std::uint32_t count) { return 1 - 1 / static_cast<double>(count); };
  // Without a second level, one collective has all ranks.
  const double within = share(first == 1 ? ranks : first);
  return (within * static_cast<double>(traffic.gathered_bytes + traffic.reduced_bytes) +
          share(ranks / first) * static_cast<double>(traffic.crossed_bytes)) /
         link_bytes_per_second;
}

}  // namespace sluice
