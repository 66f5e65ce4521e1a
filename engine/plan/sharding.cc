#include "engine/plan/sharding.h"

#include <algorithm>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {

void require_group_number(const Config::Sharding& sharding, std::uint32_t count) {
  if (count > 1 && sharding.group_is_node)
    throw Error(ErrorCode::kConfig,
                "sharding.group is \"node\", and how many ranks a node will have is not known "
                "here; give their number");
}

std::uint32_t group_size(const Config::Sharding& sharding, std::uint32_t count) {
  if (count == 1) return 1;
  SLUICE_CHECK(!sharding.group_is_node, "group_ranks is set before this");
  const std::uint32_t group = sharding.group_ranks == 0 ? count : sharding.group_ranks;
  if (count % group != 0)
    throw Error(ErrorCode::kConfig,
                fmt::format("sharding.group is {}, but {} ranks are not a multiple of that; choose "
                            "a divisor, or another number of ranks",
                            group, count));
  return group;
}

std::uint32_t first_level_ranks(const Config::Sharding& sharding, std::uint32_t count) {
  const std::uint32_t group = group_size(sharding, count);
  if (count == 1 || sharding.reduction != RankReduction::kNodes) return group < count ? group : 1;
  if (group < count)
    throw Error(ErrorCode::kConfig,
                fmt::format("sharding.reduction is \"nodes\" and sharding.group is {} of {} ranks; "
                            "groups add inside themselves first anyway, so set sharding.reduction "
                            "to \"exact\", or sharding.group to \"world\"",
                            group, count));
  const std::uint32_t node = sharding.node_ranks;
  if (node == 0 || count % node != 0)
    throw Error(ErrorCode::kConfig,
                fmt::format("sharding.reduction is \"nodes\", and sharding.node_ranks is {} for {} "
                            "ranks; set it to the number of ranks on a node, a divisor of {}",
                            node, count, count));
  return node < count ? node : 1;
}

Shard shard_of(const Config::Sharding& sharding, std::uint32_t rank, std::uint32_t count) {
  const std::uint32_t group = group_size(sharding, count);
  const bool has_levels = first_level_ranks(sharding, count) > 1;
  if (group == 1 || sharding.stage == 0)
    return {.keeps_all_gradients = count > 1, .pieces = has_levels ? count : 1};
  return {.index = rank % group,
          .count = group,
          .keeps_all_gradients = sharding.stage < 2,
          .keeps_all_parameters = sharding.stage < 3,
          .keep_gathered_bytes = sharding.keep_gathered_bytes,
          .pieces = count / group};
}

bool reduces_each_use(const Shard& shard, std::uint32_t micro_batches, MicroBatchOrder order) {
  const bool shares_gradients = shard.count > 1 && !shard.keeps_all_gradients;
  return shares_gradients || micro_batches == 1 || order == MicroBatchOrder::kVertical;
}

std::uint64_t partial_sum_elements(const Config::Sharding& sharding, std::uint32_t count,
                                   const Layout& layout) {
  const std::uint32_t first = first_level_ranks(sharding, count);
  std::uint64_t elements = 0;
  if (first == 1) return elements;
  for (const UnitPlace& unit : layout.units())
    if (!unit.is_frozen && !unit.is_local)
      elements = std::max(elements, unit.element_count / first);
  return elements;
}

std::uint64_t gather_buffer_bytes(const Config::Sharding& sharding, std::uint32_t count,
                                  const Layout& layout) {
  const std::uint32_t first = first_level_ranks(sharding, count);
  if (first == 1 || group_size(sharding, count) < count || layout.shard().count == 1) return 0;
  std::uint64_t bytes = 0;
  for (const UnitPlace& unit : layout.units())
    if (!unit.is_local)
      bytes = std::max(bytes, layout.shard_parameter_bytes(unit.id) * (count / first));
  return bytes;
}

// Scheduled and resident units have one each, and announced units where the model has any that
// ranks use together.
std::uint32_t gather_buffer_count(const Layout& layout) {
  const auto is_gathered = [](const UnitPlace& unit) {
    return unit.is_announced && !unit.is_local;
  };
  return std::ranges::any_of(layout.units(), is_gathered) ? 3 : 2;
}

// At least one word per rank; if there are few ranks, everything that they send in one piece.
std::uint64_t vote_buffer_bytes(std::uint32_t count) {
  return std::max(64_KiB, align_up(count * sizeof(std::uint64_t), 4_KiB));
}

std::uint64_t rank_buffer_bytes(const Config::Sharding& sharding, std::uint32_t count,
                                const Layout& layout) {
  if (count == 1) return 0;
  return vote_buffer_bytes(count) + partial_sum_elements(sharding, count, layout) * sizeof(float) +
         gather_buffer_bytes(sharding, count, layout) * gather_buffer_count(layout);
}

namespace {

// The effective stage: in groups of one rank, each keeps everything, whatever the stage.
std::string describe_stage(const Config::Sharding& sharding, std::uint32_t count) {
  if (group_size(sharding, count) != 1 || sharding.stage == 0)
    return fmt::format("sharding.stage {}", sharding.stage);
  return fmt::format("sharding.stage {} in groups of one rank (sharding.group), which is stage 0",
                     sharding.stage);
}

// The way to a stage that shares more.
std::string remedy_for(const Config::Sharding& sharding, std::uint32_t count,
                       std::string_view stages) {
  if (group_size(sharding, count) != 1) return fmt::format("choose {}", stages);
  return fmt::format("choose a larger sharding.group with {}", stages);
}

}  // namespace

void check_homes(const Config::Sharding& sharding, std::uint32_t count,
                 const Config::Placement& choices) {
  const Shard shard = shard_of(sharding, 0, count);
  const bool is_elsewhere =
      choices.parameters == TierChoice::kHost || choices.parameters == TierChoice::kNvme;
  if (shard.keeps_all_parameters && is_elsewhere)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("placement.parameters \"{}\" with {}: all parameters are kept in every rank's "
                    "device memory; {}, or device",
                    choices.parameters == TierChoice::kHost ? "host" : "nvme",
                    describe_stage(sharding, count), remedy_for(sharding, count, "stage 3")));
  if (shard.keeps_all_gradients && choices.gradients == TierChoice::kNvme)
    throw Error(
        ErrorCode::kConfig,
        fmt::format("placement.gradients \"nvme\" with {}: all gradients are kept in every "
                    "rank's memory; {}, or host or device",
                    describe_stage(sharding, count), remedy_for(sharding, count, "stage 2 or 3")));
}

}  // namespace sluice
