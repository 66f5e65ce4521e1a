#include "engine/plan/placement_planner.h"

#include <algorithm>
#include <span>

#include <sluice/units.h>
#include "engine/plan/window_plan.h"

namespace sluice {
namespace {

// Units read ahead of the one in use, beyond the leases held. Two hide one transfer behind one
// computation and absorb jitter.
constexpr std::uint32_t kPrefetchUnits = 2;
// One block comes, one is updated, one goes, and one waits.
constexpr std::uint32_t kUpdatesStreamedWanted = 4;
// Activations travel between device and storage in pieces that saturate a drive with a few of them.
constexpr std::uint64_t kActivationPieceBytesMax = 4_MiB;
constexpr std::uint32_t kActivationStagingWanted = 4;

std::vector<std::uint64_t> unit_sizes(const Layout& layout) {
  std::vector<std::uint64_t> sizes;
  for (const UnitPlace& unit : layout.units())
    sizes.push_back(layout.unit_parameter_bytes(unit.id));
  return sizes;
}

// Steps of one micro-batch, of two (a third brings nothing new), and the largest step that the
// config names. A window for one lease serves them all.
std::vector<Schedule> schedules_of(const ModelSpec& model, const Config::Activations& largest) {
  std::vector<Schedule> schedules{training_schedule(model, 1)};
  if (model.concurrent_leases == 1) return schedules;
  schedules.push_back(inference_schedule(model));
  schedules.push_back(training_schedule(model, 2));
  if (largest.micro_batches > 1)
    schedules.push_back(training_schedule(model, largest.micro_batches, largest.order));
  return schedules;
}

// Places for the announced units that are leased, and for those read ahead. `sizes` has 0 for units
// without a place. `places` is the number of all of them.
SlotPool announced_window_of(const Layout& layout, std::span<const std::uint64_t> sizes,
                             std::uint32_t places) {
  SlotPool window;
  for (const UnitPlace& unit : layout.units()) {
    if (!unit.is_announced || sizes[index_of(unit.id)] == 0) continue;
    window = {
        .count = places,
        .slot_bytes = std::max(window.slot_bytes,
                               align_up(layout.unit_parameter_bytes(unit.id), kStorageAlignBytes))};
  }
  return window;
}

// A window in which units may be leased in any order, as far as the budget has room for it beside
// everything else.
std::uint64_t widened_window(const Layout& layout, const Placement& placement,
                             std::span<const std::uint64_t> sizes, std::uint32_t leases) {
  std::vector<std::uint64_t> passing;
  std::uint64_t all_bytes = 0;  // more is never in use
  for (const UnitPlace& unit : layout.units()) {
    if (unit.is_announced) continue;
    passing.push_back(align_up(sizes[index_of(unit.id)], kStorageAlignBytes));
    all_bytes += passing.back();
  }
  const std::uint64_t room =
      placement.device_budget_bytes - placement.device_bytes() + placement.window_bytes;
  const std::uint64_t most = std::min({all_bytes, any_order_window_bytes(passing, leases),
                                       room / kStorageAlignBytes * kStorageAlignBytes});
  return std::max(placement.window_bytes, most);
}

// Gradients of local units have slots of their own: the slots that a reduction uses have to be the
// same on all ranks.
bool has_local_gradients(const Layout& layout) {
  return std::ranges::any_of(
      layout.units(), [](const UnitPlace& unit) { return unit.is_local && !unit.is_frozen; });
}

// Whether units of both kinds have places in the announced window. `sizes` has 0 for the others.
bool needs_both_kinds(const Layout& layout, std::span<const std::uint64_t> sizes) {
  const auto has = [&](bool is_local) {
    return std::ranges::any_of(layout.units(), [&](const UnitPlace& unit) {
      return unit.is_announced && unit.is_local == is_local && sizes[index_of(unit.id)] != 0;
    });
  };
  return has(/*is_local=*/true) && has(/*is_local=*/false);
}

// Whether some units are not frozen.
bool are_trained(const Layout& layout) {
  return std::ranges::any_of(layout.units(), [](const UnitPlace& unit) { return !unit.is_frozen; });
}

// The device memory that its update takes beside its parameters.
std::uint64_t update_bytes(const Layout& layout, const Placement& placement,
                           const UnitPlace& unit) {
  std::uint64_t bytes = placement.gradient_is_on_device(unit.id)
                            ? 0
                            : set_slot_bytes(layout, unit) + tally_bytes_of(unit);
  for (const BlockPlace& block : layout.blocks_of(unit.id))
    bytes += layout.record_slot_bytes(block.id);
  return bytes;
}

}  // namespace

std::uint64_t home_slot_bytes(const Layout& layout, const UnitPlace& unit) {
  return align_up(layout.home_parameter_bytes(unit.id), kStorageAlignBytes);
}

std::uint64_t set_slot_bytes(const Layout& layout, const UnitPlace& unit) {
  return align_up(layout.set_gradient_bytes(unit.id), kStorageAlignBytes);
}

PlacementPlanner::PlacementPlanner(const Layout& layout, const ModelSpec& model,
                                   const Config::Placement& choices, const PassNeeds& pass)
    : layout_(layout),
      model_(model),
      choices_(choices),
      pass_(pass),
      schedule_(training_schedule(model, 1)),
      all_schedules_(schedules_of(model, pass.activations)),
      sizes_(unit_sizes(layout)) {
  placement_.fills_device = pass.fills_device;
  placement_.is_unified = pass.is_unified;
  placement_.leases_gradient_set = pass.is_unified && pass.is_alone && model.concurrent_leases == 1;
  // Leased there, units need no window.
  if (pass.is_unified && choices.parameters == TierChoice::kHost) {
    for (const UnitPlace& unit : layout.units())
      if (!unit.is_sharded) sizes_[index_of(unit.id)] = 0;
  }
  placement_.rank_buffer_bytes = pass.rank_buffer_bytes;
  placement_.parameter_tier.assign(layout.blocks().size(), Tier::kNvme);
  placement_.record_tier.assign(layout.blocks().size(), Tier::kNvme);
  placement_.gradient_tier.assign(layout.units().size(), Tier::kHost);
  clear_records();
  for (const BlockPlace& block : layout.blocks())
    largest_block_ = std::max(largest_block_, block.element_count);
  for (const UnitPlace& unit : layout.units())
    placement_.gradient_set_bytes += set_slot_bytes(layout_, unit);
  if (pass_.activations.home != ActivationHome::kKeep) plan_activation_pools();
}

std::optional<PlacementShortage> PlacementPlanner::attempt(const Budgets& budgets,
                                                           const PlacementThrift& thrift) {
  thrift_ = thrift;
  placement_.device_budget_bytes = budgets.device_bytes;
  placement_.host_budget_bytes = budgets.host_bytes;
  if (const auto shortage = plan_device()) return shortage;
  if (const auto shortage = plan_host()) return shortage;
  add_lanes();
  if (placement_.is_unified) lease_in_host();
  if (!thrift.buffers && model_.concurrent_leases > 1)
    placement_.window_bytes = widened_window(layout_, placement_, sizes_, model_.concurrent_leases);
  add_nvme_bytes();
  return std::nullopt;
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

// Homes for the activations of the largest step; and a window that holds them all, or those in use
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

// Device: gradient slots, pinned units, state and gradients that have to be there, then either
// every other parameter, or a window and as many whole units (if ranks share the parameters: shards
// of units) as fit beside it; then the optimizer state of some of those.
std::optional<PlacementShortage> PlacementPlanner::plan_device() {
  const std::uint32_t leases = model_.concurrent_leases;
  std::uint64_t slot_bytes = 0;
  std::uint64_t all_bytes = 0;  // beside pinned units
  for (const UnitPlace& unit : layout_.units()) {
    slot_bytes =
        std::max(slot_bytes, align_up(layout_.unit_gradient_bytes(unit.id), kStorageAlignBytes));
    all_bytes += unit.is_pinned ? 0 : home_slot_bytes(layout_, unit);
    if (choices_.optimizer == TierChoice::kDevice) update_on_device(unit);
    if (choices_.gradients == TierChoice::kDevice) set_gradient_tier(unit, Tier::kDevice);
  }
  const bool is_sharded = layout_.shard().count > 1 && !layout_.shard().keeps_all_parameters;
  const bool must_be_resident = choices_.parameters == TierChoice::kDevice ||
                                choices_.optimizer == TierChoice::kDevice ||
                                layout_.shard().keeps_all_parameters;
  for (const UnitPlace& unit : layout_.units())
    if (unit.is_pinned || (must_be_resident && is_sharded)) make_resident(unit);
  // One slot more than the leases lets a gradient drain while the next unit's backward runs.
  placement_.local_gradient_slots = !pass_.is_alone && has_local_gradients(layout_) ? leases : 0;
  placement_.gradient_slots = {.count = leases + placement_.local_gradient_slots,
                               .slot_bytes = slot_bytes};
  placement_.streams_updates =
      pass_.streams_updates && choices_.optimizer != TierChoice::kDevice && are_trained(layout_);
  if (placement_.streams_updates)
    placement_.update_staging = {.count = thrift_.buffers ? 1 : kUpdatesStreamedWanted,
                                 .slot_bytes = update_slot(layout_).size_bytes};
  // All parameters, or a window for units to pass through.
  const bool needs_all = must_be_resident && !is_sharded;
  const std::uint64_t window_minimum = needs_all ? 0 : least_window();
  placement_.splits_announced_window =
      !needs_all && !pass_.is_alone && needs_both_kinds(layout_, sizes_);
  const std::uint32_t kinds = placement_.splits_announced_window ? 2 : 1;
  if (!needs_all)
    placement_.announced_window = announced_window_of(
        layout_, sizes_, kinds * (leases + (thrift_.buffers ? 0 : kPrefetchUnits)));
  const auto needed_bytes = [&] {
    return placement_.device_bytes() + (needs_all ? all_bytes : window_minimum);
  };
  // Beside activations: many places if they and the least of the rest fit, otherwise few.
  const std::uint64_t whole_budget = placement_.device_budget_bytes;
  if (thrift_.buffers || needed_bytes() > whole_budget)
    placement_.activation_window.count = activation_places_least_;
  if (needed_bytes() > whole_budget)
    placement_.announced_window.count = std::min(placement_.announced_window.count, kinds * leases);
  if (needed_bytes() > whole_budget)
    placement_.update_staging.count = std::min(placement_.update_staging.count, 1u);
  if (needed_bytes() > whole_budget)
    return PlacementShortage{.tier = Tier::kDevice, .needed_bytes = needed_bytes()};
  const std::uint64_t rest_bytes = whole_budget - placement_.device_bytes();
  const bool may_all_be_resident =
      !is_sharded && may_be_resident() &&
      all_bytes <= rest_bytes + placement_.announced_window.size_bytes();
  if (needs_all || may_all_be_resident) {
    placement_.announced_window = {};
    placement_.splits_announced_window = false;
    for (const UnitPlace& unit : layout_.units())
      if (!unit.is_pinned) make_resident(unit);
  } else {
    plan_window_pool(rest_bytes, window_minimum);
  }
  if (!thrift_.buffers && placement_.device_bytes() + slot_bytes <= whole_budget)
    ++placement_.gradient_slots.count;
  if (pass_.fills_device && choices_.optimizer == TierChoice::kAuto) fill_device();
  return std::nullopt;
}

std::uint64_t PlacementPlanner::least_window() const {
  std::uint64_t window_bytes = 0;
  for (const Schedule& schedule : all_schedules_)
    window_bytes =
        std::max(window_bytes, least_window_bytes(schedule, sizes_, model_.concurrent_leases));
  return window_bytes;
}

// Optimizer state of units whose parameters are at home there, from the first one on: their
// gradients are the last to come and their parameters the first to be needed, so computation would
// wait for their update.
void PlacementPlanner::fill_device() {
  if (thrift_.records || thrift_.parameters) return;
  if (choices_.gradients == TierChoice::kHost || choices_.gradients == TierChoice::kNvme) return;
  for (const UnitPlace& unit : layout_.units()) {
    const bool fits = placement_.device_bytes() + update_bytes(layout_, placement_, unit) <=
                      placement_.device_budget_bytes;
    if (fits && placement_.is_homed_on_device(unit)) update_on_device(unit);
  }
}

void PlacementPlanner::update_on_device(const UnitPlace& unit) {
  if (unit.is_frozen) return;
  for (const BlockPlace& block : layout_.blocks_of(unit.id)) {
    placement_.record_tier[index_of(block.id)] = Tier::kDevice;
    placement_.device_record_bytes += layout_.record_slot_bytes(block.id);
  }
  set_gradient_tier(unit, Tier::kDevice);
}

// The planner's choice. If ranks share the state but not the parameters, everything is resident.
bool PlacementPlanner::may_be_resident() const {
  return choices_.parameters == TierChoice::kAuto && !layout_.shard().keeps_all_parameters &&
         !thrift_.parameters;
}

// The window for units in use and read ahead, if `least_bytes` are the least that works.
std::uint64_t PlacementPlanner::window_wanted(std::uint64_t least_bytes) const {
  const std::uint32_t ahead = model_.concurrent_leases + kPrefetchUnits;
  return thrift_.buffers ? least_bytes
                         : std::max(least_bytes, leased_bytes_max(schedule_, sizes_, ahead));
}

// `budget` is the room beside all other mandatory pools, including the least gradient slots.
void PlacementPlanner::plan_window_pool(std::uint64_t budget, std::uint64_t window_minimum) {
  const std::uint64_t another_slot_bytes = placement_.gradient_slots.slot_bytes;
  const bool has_another = !thrift_.buffers && window_minimum + another_slot_bytes <= budget;
  const std::uint64_t reserved_bytes = has_another ? another_slot_bytes : 0;
  // A whole number of places, like the pools after it in the slab.
  const std::uint64_t window =
      std::min(window_wanted(window_minimum),
               (budget - reserved_bytes) / kStorageAlignBytes * kStorageAlignBytes);
  const std::vector<std::uint64_t> all_sizes = sizes_;
  const Placement without_homes = placement_;
  if (!thrift_.parameters) add_homes(budget - reserved_bytes - window);
  if (least_window() > window) {  // three leases and more: fewer units may take more room
    sizes_ = all_sizes;
    placement_ = without_homes;
  }
  placement_.window_bytes = std::min(window, window_wanted(least_window()));
}

// Adds homes as far as they fit.
void PlacementPlanner::add_homes(std::uint64_t rest_bytes) {
  const auto add = [&](bool are_kept, bool are_announced) {
    for (const UnitPlace& unit : layout_.units()) {
      if (placement_.is_homed_on_device(unit) || layout_.keeps_gathered(unit.id) != are_kept ||
          unit.is_announced != are_announced)
        continue;
      if (home_slot_bytes(layout_, unit) > rest_bytes) return;
      rest_bytes -= home_slot_bytes(layout_, unit);
      make_resident(unit);
    }
  };
  // A step uses some of the announced units only: a home of another unit saves more.
  for (const bool are_announced : {false, true}) add(/*are_kept=*/true, are_announced);
  if (!may_be_resident()) return;
  for (const bool are_announced : {false, true}) add(/*are_kept=*/false, are_announced);
}

// Units whose parameters all lie in host memory, and so together, are leased there. The window that
// the other units pass through may then be smaller.
void PlacementPlanner::lease_in_host() {
  const std::vector<std::uint64_t> all_sizes = sizes_;
  placement_.is_leased_in_host.assign(layout_.units().size(), false);
  for (const UnitPlace& unit : layout_.units()) {
    const auto blocks = layout_.blocks_of(unit.id);
    const bool is_in_host = std::ranges::all_of(blocks, [&](const BlockPlace& block) {
      return placement_.parameter_tier[index_of(block.id)] == Tier::kHost;
    });
    if (!is_in_host) continue;
    placement_.is_leased_in_host[index_of(unit.id)] = true;
    sizes_[index_of(unit.id)] = 0;
  }
  const std::uint64_t least = least_window();
  if (least > placement_.window_bytes) {  // three leases and more: fewer units may take more room
    sizes_ = all_sizes;
    placement_.is_leased_in_host.clear();
    return;
  }
  placement_.window_bytes = std::min(placement_.window_bytes, window_wanted(least));
  if (const std::uint32_t places = placement_.announced_window.count; places != 0)
    placement_.announced_window = announced_window_of(layout_, sizes_, places);
}

void PlacementPlanner::make_resident(const UnitPlace& unit) {
  placement_.resident_parameter_bytes += home_slot_bytes(layout_, unit);
  if (!unit.is_sharded) sizes_[index_of(unit.id)] = 0;
  for (const BlockPlace& block : layout_.blocks_of(unit.id))
    placement_.parameter_tier[index_of(block.id)] = Tier::kDevice;
}

}  // namespace sluice
