#include "engine/placement_planner.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/error.h"
#include "base/units.h"
#include "engine/window_plan.h"

namespace sluice {
namespace {

// Units read ahead of the one in use, beyond the leases held. Two hide one transfer behind one
// computation and absorb jitter.
constexpr std::uint32_t kPrefetchUnits = 2;
// Activations travel between device and storage in pieces that saturate a drive with a few of them.
constexpr std::uint64_t kActivationPieceBytesMax = 4_MiB;
constexpr std::uint32_t kActivationStagingWanted = 4;

std::vector<std::uint64_t> unit_sizes(const Layout& layout) {
  std::vector<std::uint64_t> sizes;
  for (const UnitPlace& unit : layout.units())
    sizes.push_back(layout.unit_parameter_bytes(unit.id));
  return sizes;
}

}  // namespace

void fail_budget(Tier tier, const char* key, std::uint64_t budget_bytes, std::uint64_t needed_bytes,
                 const std::vector<Pool>& pools) {
  std::string message = fmt::format(
      "{} = {} is too small; the smallest that works is \"{}KiB\" ({}):", key,
      format_bytes(budget_bytes), div_ceil(needed_bytes, 1_KiB), format_bytes(needed_bytes));
  for (const Pool& pool : pools) {
    if (pool.tier == tier && pool.size_bytes != 0)
      message += fmt::format("\n  {:<24} {:>10}  {}", pool.name, format_bytes(pool.size_bytes),
                             pool.reason);
  }
  throw Error(ErrorCode::kOutOfMemory, message);
}

PlacementPlanner::PlacementPlanner(const Layout& layout, const ModelSpec& model,
                                   const Config::Placement& choices, const Budgets& budgets,
                                   const PassNeeds& pass)
    : layout_(layout),
      model_(model),
      choices_(choices),
      pass_(pass),
      schedule_(training_schedule(model, 1)),
      sizes_(unit_sizes(layout)) {
  placement_.fills_device = pass.fills_device;
  placement_.device_budget_bytes = budgets.device_bytes;
  placement_.host_budget_bytes = budgets.host_bytes;
  placement_.parameter_tier.assign(layout.blocks().size(), Tier::kNvme);
  placement_.record_tier.assign(layout.blocks().size(), Tier::kNvme);
  placement_.gradient_tier.assign(layout.units().size(), Tier::kHost);
  clear_records();
  for (const UnitPlace& unit : layout.units())
    placement_.gradient_set_bytes += gradient_bytes(unit);
}

Placement PlacementPlanner::plan() {
  if (pass_.activations.home != ActivationHome::kKeep) plan_activation_pools();
  plan_device();
  plan_host();
  add_nvme_bytes();
  return std::move(placement_);
}

void PlacementPlanner::add_nvme_bytes() {
  for (const BlockPlace& block : layout_.blocks()) {
    const std::uint32_t i = index_of(block.id);
    if (placement_.parameter_tier[i] == Tier::kNvme)
      placement_.nvme_parameter_bytes += layout_.parameter_slot_bytes(block.id);
    if (placement_.record_tier[i] == Tier::kNvme)
      placement_.nvme_record_bytes += layout_.record_slot_bytes(block.id);
    if (placement_.gradient_tier[index_of(block.unit)] == Tier::kNvme)
      placement_.nvme_gradient_bytes += layout_.gradient_slot_bytes(block.id);
  }
}

// Homes for the activations of the largest step; a window that holds them all, or what is in use
// and read ahead.
void PlacementPlanner::plan_activation_pools() {
  const Config::Activations& activations = pass_.activations;
  const ActivationNeeds needs = activation_needs(model_, activations, kPrefetchUnits);
  const ActivationHomes& homes = needs.homes;
  activation_places_least_ = needs.places_least;
  placement_.activation_window = {.count = needs.places_wanted,
                                  .slot_bytes = homes.largest_bytes()};
  if (activations.home == ActivationHome::kHost)
    placement_.host_activation_bytes = homes.size_bytes();
  if (activations.home == ActivationHome::kNvme) {
    placement_.nvme_activation_bytes = homes.size_bytes();
    placement_.activation_staging = {
        .count = kActivationStagingWanted,
        .slot_bytes = std::min(homes.largest_bytes(), kActivationPieceBytesMax)};
  }
  placement_.activation_homes = homes;
}

// Device: gradient slots, state and gradients that are to be there, then either every parameter, or
// a window and as many whole units (of ranks that share the parameters: shards of units) as fit
// beside it; and the state of some of those.
void PlacementPlanner::plan_device() {
  const std::uint32_t leases = model_.concurrent_leases;
  std::uint64_t slot_bytes = 0;
  std::uint64_t all_bytes = 0;
  for (const UnitPlace& unit : layout_.units()) {
    slot_bytes =
        std::max(slot_bytes, align_up(layout_.unit_gradient_bytes(unit.id), kStorageAlignBytes));
    all_bytes += unit_slot_bytes(unit);
    if (choices_.optimizer == TierChoice::kDevice) update_on_device(unit);
    if (choices_.gradients == TierChoice::kDevice) set_gradient_tier(unit, Tier::kDevice);
  }
  const bool is_sharded = layout_.shard().count > 1 && !layout_.shard().keeps_all_parameters;
  const bool must_be_resident = choices_.parameters == TierChoice::kDevice ||
                                choices_.optimizer == TierChoice::kDevice ||
                                layout_.shard().keeps_all_parameters;
  if (must_be_resident && is_sharded) {
    for (const UnitPlace& unit : layout_.units()) make_resident(unit);
  }
  // One slot more than the leases lets a gradient drain while the next unit's backward runs.
  placement_.gradient_slots = {.count = leases, .slot_bytes = slot_bytes};
  const std::uint64_t minimum_slots_bytes = leases * slot_bytes;
  const std::uint64_t window_minimum = window_bytes_for(schedule_, sizes_, leases);
  // Beside activations: many places if they and the least of the rest fit, else few.
  SlotPool& activations = placement_.activation_window;
  const std::uint64_t whole_budget = placement_.device_budget_bytes;
  const std::uint64_t set_bytes =
      placement_.device_gradient_bytes + placement_.device_record_bytes + placement_.tally_bytes;
  if (activations.size_bytes() + set_bytes + placement_.resident_parameter_bytes + window_minimum +
          minimum_slots_bytes >
      whole_budget)
    activations.count = activation_places_least_;
  const std::uint64_t fixed_bytes =
      activations.size_bytes() + set_bytes + placement_.resident_parameter_bytes;
  const std::uint64_t budget = whole_budget - std::min(whole_budget, fixed_bytes);
  const bool may_all_be_resident = !is_sharded && (must_be_resident || may_be_resident());
  if (may_all_be_resident && all_bytes + minimum_slots_bytes <= budget) {
    for (const UnitPlace& unit : layout_.units()) make_resident(unit);
  } else if (must_be_resident && !is_sharded) {
    placement_.resident_parameter_bytes = all_bytes;
    fail_budget(Tier::kDevice, "memory.device", whole_budget,
                fixed_bytes + all_bytes + minimum_slots_bytes, placement_.pools());
  } else {
    if (window_minimum + minimum_slots_bytes > budget) {
      placement_.window_bytes = window_minimum;
      fail_budget(Tier::kDevice, "memory.device", whole_budget,
                  fixed_bytes + window_minimum + minimum_slots_bytes, placement_.pools());
    }
    plan_window_pool(budget, window_minimum);
  }
  if (placement_.device_bytes() + slot_bytes <= whole_budget) ++placement_.gradient_slots.count;
  if (pass_.fills_device && choices_.optimizer == TierChoice::kAuto) fill_device();
}

// State of units whose parameters are at home there, from the first one on: their gradients are the
// last to come and their parameters the first to be wanted, so that it is their update which
// computation would wait for.
void PlacementPlanner::fill_device() {
  if (choices_.gradients == TierChoice::kHost || choices_.gradients == TierChoice::kNvme) return;
  for (const UnitPlace& unit : layout_.units()) {
    const bool fits =
        placement_.device_bytes() + update_bytes(unit) <= placement_.device_budget_bytes;
    if (fits && placement_.is_homed_on_device(unit)) update_on_device(unit);
  }
}

// Beside its parameters.
std::uint64_t PlacementPlanner::update_bytes(const UnitPlace& unit) const {
  std::uint64_t bytes =
      placement_.gradient_is_on_device(unit.id) ? 0 : gradient_bytes(unit) + tally_bytes_of(unit);
  for (const BlockPlace& block : layout_.blocks_of(unit.id))
    bytes += layout_.record_slot_bytes(block.id);
  return bytes;
}

void PlacementPlanner::update_on_device(const UnitPlace& unit) {
  if (unit.is_frozen) return;
  for (const BlockPlace& block : layout_.blocks_of(unit.id)) {
    placement_.record_tier[index_of(block.id)] = Tier::kDevice;
    placement_.device_record_bytes += layout_.record_slot_bytes(block.id);
  }
  set_gradient_tier(unit, Tier::kDevice);
}

// The planner's choice. Of ranks that share the state but not the parameters, all is resident.
bool PlacementPlanner::may_be_resident() const {
  return choices_.parameters == TierChoice::kAuto && !layout_.shard().keeps_all_parameters;
}

void PlacementPlanner::plan_window_pool(std::uint64_t budget, std::uint64_t window_minimum) {
  const std::uint32_t ahead = model_.concurrent_leases + kPrefetchUnits;
  SlotPool& slots = placement_.gradient_slots;
  const std::uint64_t two_slots_bytes = slots.size_bytes() + slots.slot_bytes;
  const std::uint64_t reserved_bytes =
      window_minimum + two_slots_bytes <= budget ? two_slots_bytes : slots.size_bytes();
  const std::uint64_t window =
      std::min(window_bytes_for(schedule_, sizes_, ahead), budget - reserved_bytes);
  std::uint64_t rest = budget - reserved_bytes - window;
  const auto add_homes = [&](bool are_kept) {
    for (const UnitPlace& unit : layout_.units()) {
      if (placement_.is_homed_on_device(unit) || layout_.keeps_gathered(unit.id) != are_kept)
        continue;
      if (unit_slot_bytes(unit) > rest) return;
      rest -= unit_slot_bytes(unit);
      make_resident(unit);
    }
  };
  add_homes(/*are_kept=*/true);
  if (may_be_resident()) add_homes(/*are_kept=*/false);
  placement_.window_bytes = std::min(window, window_bytes_for(schedule_, sizes_, ahead));
}

void PlacementPlanner::make_resident(const UnitPlace& unit) {
  placement_.resident_parameter_bytes += unit_slot_bytes(unit);
  if (!unit.is_sharded) sizes_[index_of(unit.id)] = 0;
  for (const BlockPlace& block : layout_.blocks_of(unit.id))
    placement_.parameter_tier[index_of(block.id)] = Tier::kDevice;
}

std::uint64_t PlacementPlanner::unit_slot_bytes(const UnitPlace& unit) const {
  return align_up(layout_.home_parameter_bytes(unit.id), kStorageAlignBytes);
}

Placement plan_placement(const Layout& layout, const ModelSpec& model,
                         const Config::Placement& choices, const Budgets& budgets,
                         const PassNeeds& pass) {
  return PlacementPlanner(layout, model, choices, budgets, pass).plan();
}

}  // namespace sluice
