// The host's pools: gradients, transfer buffers, then state by the traffic that it
// saves.
#include <algorithm>
#include <cstring>
#include <span>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/placement_planner.h"

namespace sluice {
namespace {

// Read, Adam and write of three blocks overlap; the fourth absorbs jitter.
constexpr std::uint32_t kLanesMinimumWanted = 4;
// Small blocks cost the latency of a drive and of threads that wake, not the time of their bytes:
// as many lanes as hold this many bytes of records, which is more than four for blocks of fewer
// than 6,500 elements.
constexpr std::uint64_t kLaneBytesWanted = 256_KiB;
// During computation a pass gets work in bursts of a unit: one is updated while the next is read.
// Homes in host memory are worth more than further lanes: they save the traffic that lanes hide.
constexpr std::uint32_t kUnitsInLanes = 2;
constexpr std::uint32_t kLanesMaximumWanted = 64;
// With memory to spare there are up to this many. The scheduler looks at all lanes after each
// event, which takes a few microseconds then.
constexpr std::uint32_t kLanesMaximumSpare = 1024;
// Keeps a drive's queue filled while earlier blocks are copied to the device.
constexpr std::uint32_t kStagingSlotsWanted = 8;
// One piece is added while the next is copied; where gradients leave, a few are under way.
constexpr std::uint32_t kGradientStagingWanted = 2;
constexpr std::uint32_t kLeavingStagingWanted = 8;
// Access to the state outside of steps reads one block while it works on another.
constexpr std::uint32_t kAccessSlots = 2;
// One block is written while the next comes from the device.
constexpr std::uint32_t kCommitBuffers = 2;

// The largest piece of a gradient in the set: a block, or more if the set has other ranks' parts.
std::uint64_t largest_piece(const Layout& layout) {
  std::uint64_t largest = 0;
  for (const UnitPlace& unit : layout.units())
    largest = std::max(largest, std::min(layout.block_elements(), layout.set_elements(unit.id)));
  return largest;
}

std::uint32_t lanes_for_bursts(const Layout& layout, std::uint64_t largest_block, bool overlaps) {
  const std::uint64_t record_bytes =
      std::max(align_up(layout.format().record_bytes(largest_block), kStorageAlignBytes),
               kStorageAlignBytes);
  const auto least = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
      kLaneBytesWanted / record_bytes, kLanesMinimumWanted, kLanesMaximumWanted));
  if (!overlaps) return least;
  std::uint32_t blocks = 0;
  for (const UnitPlace& unit : layout.units()) blocks = std::max(blocks, unit.block_count);
  return std::clamp(kUnitsInLanes * blocks, least, kLanesMaximumWanted);
}

}  // namespace

std::optional<PlacementShortage> PlacementPlanner::plan_host() {
  const bool may_leave = !layout_.shard().keeps_all_gradients &&
                         (choices_.gradients == TierChoice::kAuto) &&
                         placement_.gradient_set_bytes != 0;
  if (choices_.gradients == TierChoice::kNvme) {
    for (const UnitPlace& unit : layout_.units()) set_gradient_tier(unit, Tier::kNvme);
  }
  const SlotPool activation_staging = placement_.activation_staging;
  const auto without_gradients = [&](std::uint32_t buffers_most) {
    send_gradients_away();
    placement_.activation_staging = activation_staging;
    return try_host(buffers_most);
  };
  const std::optional<PlacementShortage> shortage = try_host(kLanesMaximumWanted);
  if (!may_leave) return shortage;
  if (shortage) {
    const std::optional<PlacementShortage> rest = without_gradients(kLanesMaximumWanted);
    return !rest || rest->needed_bytes < shortage->needed_bytes ? rest : shortage;
  }
  const auto has_one_lane = [this] {
    return !pass_.lanes && placement_.lanes.count == 1 && homes_in_use().records_on_storage;
  };
  if (!has_one_lane()) return std::nullopt;
  // A single lane reads, updates and writes in turn, which costs more than gradients that leave. As
  // many as fit beside a few buffers come back.
  const Placement with_gradients = placement_;
  if (without_gradients(kLanesMinimumWanted) || has_one_lane()) placement_ = with_gradients;
  return std::nullopt;
}

// Pools for the gradients' present places, with at most `buffers_most` lanes, staging slots and
// places for gradients that leave, unless the config names the number of lanes. After a shortage
// their sizes have no meaning.
std::optional<PlacementShortage> PlacementPlanner::try_host(std::uint32_t buffers_most) {
  HomesInUse homes = homes_in_use();
  placement_.gradient_staging = {
      .count = staging_least(homes) == 0    ? 0
               : homes.gradients_on_storage ? std::min(kLeavingStagingWanted, buffers_most)
                                            : kGradientStagingWanted,
      .slot_bytes =
          align_up(largest_piece(layout_) * layout_.format().gradient_bytes(), kStorageAlignBytes)};
  const bool parameters_may_be_host = choices_.parameters != TierChoice::kNvme;
  const bool records_may_be_host = choices_.optimizer != TierChoice::kNvme;
  fill_host(parameters_may_be_host, records_may_be_host, UINT64_MAX);
  const std::uint32_t lanes_for_all =
      std::min(lanes_for_bursts(layout_, largest_block_, pass_.overlaps), buffers_most);
  const std::uint32_t lanes_wanted = pass_.lanes.value_or(lanes_for_all);
  const std::uint32_t lanes_least = pass_.lanes.value_or(1);
  const std::uint32_t staging_wanted =
      std::min(kStagingSlotsWanted, buffers_most) + (pass_.overlaps ? lanes_for_all : 0);
  homes = homes_in_use();
  size_buffers(homes, staging_wanted, lanes_wanted);
  if (placement_.host_bytes() <= placement_.host_budget_bytes) {
    take_gradients_back();
    return std::nullopt;
  }
  // Not everything fits. Start again with the mandatory state, with buffers of the wanted sizes,
  // and then smaller ones.
  const std::uint64_t everything_bytes = minimum_host_bytes(lanes_least);
  fill_host(choices_.parameters == TierChoice::kHost, choices_.optimizer == TierChoice::kHost,
            UINT64_MAX);
  const std::uint64_t needed_bytes = std::min(everything_bytes, minimum_host_bytes(lanes_least));
  if (shrink_buffers(staging_wanted, lanes_wanted, lanes_least)) {
    take_gradients_back();
    fill_host(parameters_may_be_host, records_may_be_host,
              placement_.host_budget_bytes - placement_.host_bytes());
    return std::nullopt;
  }
  // State in host memory needs no buffers: all of it may fit where part of it does not.
  fill_host(parameters_may_be_host, records_may_be_host, UINT64_MAX);
  if (!shrink_buffers(staging_wanted, lanes_wanted, lanes_least))
    return PlacementShortage{.tier = Tier::kHost, .needed_bytes = needed_bytes};
  take_gradients_back();
  return std::nullopt;
}

// Changes the place where the unit's gradients wait.
void PlacementPlanner::set_gradient_tier(const UnitPlace& unit, Tier tier) {
  Tier& present = placement_.gradient_tier[index_of(unit.id)];
  const std::uint64_t bytes = set_slot_bytes(layout_, unit);
  if (bytes == 0 || present == tier) return;
  if (present == Tier::kHost) placement_.gradient_set_bytes -= bytes;
  if (present == Tier::kDevice) {
    placement_.device_gradient_bytes -= bytes;
    placement_.tally_bytes -= tally_bytes_of(unit);
  }
  if (tier == Tier::kHost) placement_.gradient_set_bytes += bytes;
  if (tier == Tier::kDevice) {
    placement_.device_gradient_bytes += bytes;
    placement_.tally_bytes += tally_bytes_of(unit);
  }
  present = tier;
}

PlacementPlanner::HomesInUse PlacementPlanner::homes_in_use() const {
  const auto has = [](const std::vector<Tier>& tiers, Tier tier) {
    static_assert(sizeof(Tier) == 1);
    return std::memchr(tiers.data(), static_cast<int>(tier), tiers.size()) != nullptr;
  };
  HomesInUse homes{.parameters_on_storage = has(placement_.parameter_tier, Tier::kNvme),
                   .parameters_on_device = has(placement_.parameter_tier, Tier::kDevice),
                   .records_on_storage = has(placement_.record_tier, Tier::kNvme),
                   .records_on_device = has(placement_.record_tier, Tier::kDevice),
                   .gradients_on_storage = has(placement_.gradient_tier, Tier::kNvme)};
  for (const UnitPlace& unit : layout_.units()) {
    if (placement_.is_updated_on_device(unit)) continue;
    homes.lanes_fetch_gradients |= placement_.lane_fetches_gradients(unit.id);
    homes.streams_device_gradients |=
        placement_.streams_updates && !unit.is_frozen && placement_.gradient_is_on_device(unit.id);
    homes.device_updates_all &= unit.is_frozen;
  }
  return homes;
}

// A block's gradient, and the sum that it is added to if that comes from storage; nothing if all
// gradients stay on the device permanently.
std::uint32_t PlacementPlanner::staging_least(const HomesInUse& homes) const {
  if (choices_.gradients == TierChoice::kDevice || homes.device_updates_all) return 0;
  return homes.gradients_on_storage ? 2 : 1;
}

// Sends all gradients to the device as far as there is room, and to storage.
void PlacementPlanner::send_gradients_away() {
  for (const UnitPlace& unit : layout_.units()) {
    if (placement_.gradient_is_on_device(unit.id)) continue;
    const bool fits =
        !thrift_.gradients &&
        placement_.device_bytes() + set_slot_bytes(layout_, unit) + tally_bytes_of(unit) <=
            placement_.device_budget_bytes;
    set_gradient_tier(unit, fits ? Tier::kDevice : Tier::kNvme);
  }
}

// Takes back as many as fit, from the first unit on: its gradient is the last to come in backward
// and the first to be needed. Takes none back if the choice is not the planner's.
void PlacementPlanner::take_gradients_back() {
  if (choices_.gradients != TierChoice::kAuto) return;
  for (const UnitPlace& unit : layout_.units()) {
    if (!placement_.gradient_leaves(unit.id) || placement_.is_updated_on_device(unit)) continue;
    const std::uint64_t tally =
        placement_.gradient_is_on_device(unit.id) ? tally_bytes_of(unit) : 0;
    if (placement_.host_bytes() - tally + set_slot_bytes(layout_, unit) >
        placement_.host_budget_bytes)
      return;
    set_gradient_tier(unit, Tier::kHost);
  }
}

// Sizes buffers for the present homes, as close to the wanted sizes as the budget allows. Returns
// false when the budget does not hold the least of each kind.
bool PlacementPlanner::shrink_buffers(std::uint32_t staging, std::uint32_t lanes,
                                      std::uint32_t lanes_least) {
  const HomesInUse homes = homes_in_use();
  while (true) {
    size_buffers(homes, staging, lanes);
    if (placement_.host_bytes() <= placement_.host_budget_bytes) return true;
    if (staging > std::max(lanes, lanes_least)) {
      --staging;
    } else if (lanes > lanes_least) {
      --lanes;
    } else if (staging > 1) {
      --staging;
    } else if (placement_.activation_staging.count > 1) {
      --placement_.activation_staging.count;
    } else if (placement_.gradient_staging.count > staging_least(homes)) {
      --placement_.gradient_staging.count;
    } else {
      return false;
    }
  }
}

void PlacementPlanner::clear_records() {
  for (const UnitPlace& unit : layout_.units()) {
    const auto tiers =
        std::span(placement_.record_tier).subspan(unit.first_block, unit.block_count);
    if (unit.block_count == 0 || placement_.is_updated_on_device(unit)) continue;
    std::ranges::fill(tiers, unit.is_frozen ? Tier::kHost : Tier::kNvme);
  }
}

// Gives blocks a home in host memory from the first unit on, up to `room_bytes` beyond the homes
// already there. Parameters come first: a byte of them in RAM saves three or four bytes of traffic
// per step (two or three reads and a write of every two), a byte of record two, and one of frozen
// parameters two reads.
void PlacementPlanner::fill_host(bool parameters, bool records, std::uint64_t room_bytes) {
  if (room_bytes == UINT64_MAX) {  // from scratch
    placement_.host_parameter_bytes = 0;
    placement_.host_record_bytes = 0;
    // Each is stored, changed or not, so that the compiler takes many at a time.
    for (Tier& tier : placement_.parameter_tier) tier = tier == Tier::kHost ? Tier::kNvme : tier;
    clear_records();
  }
  // Nearly all blocks of a model have the same length, so their bytes are computed once for each
  // unit. A unit's last block may be shorter.
  const auto take = [&](const UnitPlace& unit, std::vector<Tier>& tiers, auto bytes_of,
                        std::uint64_t& pool_bytes) {
    if (unit.block_count == 0) return;
    const std::uint32_t last = unit.first_block + unit.block_count - 1;
    const std::uint64_t bytes = bytes_of(BlockId{unit.first_block});
    for (std::uint32_t i = unit.first_block; i <= last; ++i) {
      if (bytes > room_bytes) i = last;
      const std::uint64_t of_this = i == last ? bytes_of(BlockId{i}) : bytes;
      if (tiers[i] != Tier::kNvme || of_this > room_bytes) continue;
      tiers[i] = Tier::kHost;
      pool_bytes += of_this;
      room_bytes -= of_this;
    }
  };
  const auto take_parameters = [&](bool frozen) {
    for (const UnitPlace& unit : layout_.units())
      if (parameters && unit.is_frozen == frozen)
        take(
            unit, placement_.parameter_tier,
            [&](BlockId block) { return layout_.parameter_slot_bytes(block); },
            placement_.host_parameter_bytes);
  };
  take_parameters(/*frozen=*/false);
  for (const UnitPlace& unit : layout_.units())
    if (records)
      take(
          unit, placement_.record_tier,
          [&](BlockId block) { return layout_.record_slot_bytes(block); },
          placement_.host_record_bytes);
  take_parameters(/*frozen=*/true);
}

// Buffers for the present homes: parameter slots where parameters are not in RAM, lanes where
// records are not, gradients of lanes where gradients are not. All but one of the prefetcher's
// slots may keep their content.
void PlacementPlanner::size_buffers(const HomesInUse& homes, std::uint32_t staging_slots,
                                    std::uint32_t lanes) {
  const StateFormat& format = layout_.format();
  const auto slot = [&](std::uint64_t bytes) { return align_up(bytes, kStorageAlignBytes); };
  const std::uint64_t parameter_slot = slot(largest_block_ * format.parameter_bytes());
  const std::uint64_t record_slot = slot(format.record_bytes(largest_block_));
  if (!homes.parameters_on_storage) staging_slots = 0;
  // Where the device updates everything, one lane serves access to the state outside of steps.
  if (homes.device_updates_all) lanes = std::min(lanes, 1u);
  const bool comes_from_device = homes.parameters_on_device && !placement_.is_unified;
  std::uint32_t lane_slots = 0;
  if (homes.parameters_on_storage || (comes_from_device && !placement_.streams_updates)) {
    lane_slots = lanes;
  } else if (comes_from_device) {
    lane_slots = std::min(lanes, kAccessSlots);
  }
  placement_.parameter_slots = {.count = staging_slots + lane_slots, .slot_bytes = parameter_slot};
  placement_.streams_device_gradients = homes.streams_device_gradients;
  placement_.kept_slots = pass_.overlaps && staging_slots > 1 ? staging_slots - 1 : 0;
  const bool lanes_hold_records = homes.records_on_storage || homes.records_on_device;
  placement_.lanes = {.count = lanes, .slot_bytes = lanes_hold_records ? record_slot : 0};
  placement_.lane_gradients = {};
  if (homes.lanes_fetch_gradients)
    placement_.lane_gradients = {.count = lanes,
                                 .slot_bytes = slot(largest_block_ * format.gradient_bytes())};
  placement_.commit_buffers = {};
  if (pass_.is_durable && (homes.parameters_on_device || homes.records_on_device))
    placement_.commit_buffers = {.count = kCommitBuffers,
                                 .slot_bytes = parameter_slot + record_slot};
  const bool is_saved_in_place =
      !homes.parameters_on_storage && !homes.parameters_on_device && !lanes_hold_records;
  placement_.save_buffers = {};
  if (pass_.save_buffers != 0)
    placement_.save_buffers = {
        .count = pass_.save_buffers,
        .slot_bytes = save_room(layout_).size_bytes() +
                      (is_saved_in_place ? 0 : parameter_slot + record_slot)};
}

// Gives host memory that is left to further lanes. A lane reads its block while backward computes.
// So each lane takes a read out of the time between backward and the next forward.
void PlacementPlanner::add_lanes() {
  if (pass_.lanes || !pass_.overlaps) return;
  std::uint32_t lanes_useful = 0;
  for (const BlockPlace& block : layout_.blocks())
    lanes_useful += placement_.record_tier[index_of(block.id)] == Tier::kNvme ? 1 : 0;
  const std::uint32_t lanes = placement_.lanes.count;
  const std::uint32_t lanes_most = std::min(lanes_useful, kLanesMaximumSpare);
  if (lanes_most <= lanes) return;
  const HomesInUse homes = homes_in_use();
  const std::uint32_t staging =
      homes.parameters_on_storage ? placement_.parameter_slots.count - lanes : 0;
  const std::uint64_t before_bytes = placement_.host_bytes();
  size_buffers(homes, staging, lanes + 1);
  const std::uint64_t lane_bytes = placement_.host_bytes() - before_bytes;
  const std::uint64_t lanes_spare = (placement_.host_budget_bytes - before_bytes) / lane_bytes;
  const auto more =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(lanes_spare, lanes_most - lanes));
  size_buffers(homes, staging, lanes + more);
}

// The bytes for the present homes with the least buffers of each kind.
std::uint64_t PlacementPlanner::minimum_host_bytes(std::uint32_t lanes) {
  const HomesInUse homes = homes_in_use();
  size_buffers(homes, 1, lanes);
  const auto surplus = [](const SlotPool& pool, std::uint32_t least) {
    return (pool.count - std::min(pool.count, least)) * pool.slot_bytes;
  };
  return placement_.host_bytes() - surplus(placement_.gradient_staging, staging_least(homes)) -
         surplus(placement_.activation_staging, 1);
}

}  // namespace sluice
