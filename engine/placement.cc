#include "engine/placement.h"

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
// Read, Adam and write of three blocks overlap; the fourth absorbs jitter.
constexpr std::uint32_t kLanesMinimumWanted = 4;
// A pass under computation gets work in bursts of a unit: one being updated while the next is read.
// More lanes than this hide nothing more, for any size of unit.
constexpr std::uint32_t kUnitsInLanes = 2;
constexpr std::uint32_t kLanesMaximumWanted = 64;
// Keeps a drive's queue filled while earlier blocks are copied to the device.
constexpr std::uint32_t kStagingSlotsWanted = 8;
constexpr std::uint32_t kGradientStagingWanted = 2;
// Activations travel between device and storage in pieces that saturate a drive with a few of them.
constexpr std::uint64_t kActivationPieceBytesMax = 4_MiB;
constexpr std::uint32_t kActivationStagingWanted = 4;

// A budget that is too small: the pools that have to fit, and the size that would hold them.
[[noreturn]] void fail_budget(Tier tier, const char* key, std::uint64_t budget_bytes,
                              std::uint64_t needed_bytes, const std::vector<Pool>& pools) {
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

class Planner {
 public:
  Planner(const Layout& layout, const ModelSpec& model, const Config::Placement& choices,
          const Budgets& budgets, const PassNeeds& pass)
      : layout_(layout),
        model_(model),
        choices_(choices),
        pass_(pass),
        schedule_(training_schedule(model, 1)) {
    placement_.device_budget_bytes = budgets.device_bytes;
    placement_.host_budget_bytes = budgets.host_bytes;
    placement_.parameter_tier.assign(layout.blocks().size(), Tier::kNvme);
    clear_records();
  }

  Placement plan() {
    if (pass_.activations.home != ActivationHome::kKeep) plan_activation_pools();
    plan_device();
    plan_host();
    for (const BlockPlace& block : layout_.blocks()) {
      const std::uint32_t i = index_of(block.id);
      if (placement_.parameter_tier[i] == Tier::kNvme)
        placement_.nvme_parameter_bytes += layout_.parameter_slot_bytes(block.id);
      if (placement_.record_tier[i] == Tier::kNvme)
        placement_.nvme_record_bytes += layout_.record_slot_bytes(block.id);
    }
    return std::move(placement_);
  }

 private:
  // Homes for the activations of the largest step; a window that holds them all, or what is in use
  // and read ahead.
  void plan_activation_pools() {
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

  // Device: gradient slots, then either every parameter, or a window and as many whole units as fit
  // beside it.
  void plan_device() {
    const std::uint32_t leases = model_.concurrent_leases;
    std::uint64_t slot_bytes = 0;
    std::uint64_t all_bytes = 0;
    for (const UnitPlace& unit : layout_.units()) {
      slot_bytes =
          std::max(slot_bytes, align_up(layout_.unit_gradient_bytes(unit.id), kPageAlignBytes));
      all_bytes += unit_slot_bytes(unit);
    }
    // One slot more than the leases lets a gradient drain while the next unit's backward runs.
    placement_.gradient_slots = {.count = leases, .slot_bytes = slot_bytes};
    const std::uint64_t minimum_slots_bytes = leases * slot_bytes;
    const std::uint64_t window_minimum = window_bytes_for(schedule_, sizes_, leases);
    // Beside activations: many places if they and the least of the rest fit, else few.
    SlotPool& activations = placement_.activation_window;
    const std::uint64_t whole_budget = placement_.device_budget_bytes;
    if (activations.size_bytes() + window_minimum + minimum_slots_bytes > whole_budget)
      activations.count = activation_places_least_;
    const std::uint64_t activation_bytes = activations.size_bytes();
    const std::uint64_t budget = whole_budget - std::min(whole_budget, activation_bytes);
    const bool must_be_resident =
        choices_.parameters == TierChoice::kDevice || layout_.shard().keeps_all_parameters;
    if ((must_be_resident || may_be_resident()) && all_bytes + minimum_slots_bytes <= budget) {
      for (const UnitPlace& unit : layout_.units()) make_resident(unit);
    } else if (must_be_resident) {
      placement_.resident_parameter_bytes = all_bytes;
      fail_budget(Tier::kDevice, "memory.device", whole_budget,
                  activation_bytes + all_bytes + minimum_slots_bytes, placement_.pools());
    } else {
      if (window_minimum + minimum_slots_bytes > budget) {
        placement_.window_bytes = window_minimum;
        fail_budget(Tier::kDevice, "memory.device", whole_budget,
                    activation_bytes + window_minimum + minimum_slots_bytes, placement_.pools());
      }
      plan_window_pool(budget, window_minimum);
    }
    if (placement_.device_bytes() + slot_bytes <= whole_budget) ++placement_.gradient_slots.count;
  }

  // The planner's choice. A home on the device is the whole unit, which ranks that share the
  // parameters do not have.
  bool may_be_resident() const {
    return choices_.parameters == TierChoice::kAuto && layout_.shard().count == 1;
  }

  void plan_window_pool(std::uint64_t budget, std::uint64_t window_minimum) {
    const std::uint32_t ahead = model_.concurrent_leases + kPrefetchUnits;
    SlotPool& slots = placement_.gradient_slots;
    const std::uint64_t two_slots_bytes = slots.size_bytes() + slots.slot_bytes;
    const std::uint64_t reserved_bytes =
        window_minimum + two_slots_bytes <= budget ? two_slots_bytes : slots.size_bytes();
    const std::uint64_t window =
        std::min(window_bytes_for(schedule_, sizes_, ahead), budget - reserved_bytes);
    std::uint64_t rest = budget - reserved_bytes - window;
    if (may_be_resident()) {
      for (const UnitPlace& unit : layout_.units()) {
        if (unit_slot_bytes(unit) > rest) break;
        rest -= unit_slot_bytes(unit);
        make_resident(unit);
      }
    }
    placement_.window_bytes = std::min(window, window_bytes_for(schedule_, sizes_, ahead));
  }

  void make_resident(const UnitPlace& unit) {
    placement_.resident_parameter_bytes += unit_slot_bytes(unit);
    sizes_[index_of(unit.id)] = 0;
    for (const BlockPlace& block : layout_.blocks_of(unit.id))
      placement_.parameter_tier[index_of(block.id)] = Tier::kDevice;
  }

  // Host: the gradient set, buffers for what comes and goes, then state by the traffic that it
  // saves.
  void plan_host() {
    for (const UnitPlace& unit : layout_.units())
      placement_.gradient_set_bytes +=
          align_up(layout_.set_gradient_bytes(unit.id), kPageAlignBytes);
    placement_.gradient_staging = {
        .count = kGradientStagingWanted,
        .slot_bytes =
            align_up(largest_piece() * layout_.format().gradient_bytes(), kPageAlignBytes)};
    const bool parameters_may_be_host = choices_.parameters != TierChoice::kNvme;
    const bool records_may_be_host = choices_.optimizer != TierChoice::kNvme;
    fill_host(parameters_may_be_host, records_may_be_host, UINT64_MAX);
    const std::uint32_t lanes_wanted = pass_.lanes.value_or(lanes_for_bursts());
    const std::uint32_t lanes_least = pass_.lanes.value_or(1);
    const std::uint32_t staging_wanted =
        kStagingSlotsWanted + (pass_.overlaps ? lanes_for_bursts() : 0);
    size_buffers(staging_wanted, lanes_wanted);
    if (placement_.host_bytes() <= placement_.host_budget_bytes) return;
    // Not all fits. Start again with what must be there, at the sizes that its buffers would like
    // to have, and then less.
    const std::uint64_t everything_bytes = minimum_host_bytes(lanes_least);
    fill_host(choices_.parameters == TierChoice::kHost, choices_.optimizer == TierChoice::kHost,
              UINT64_MAX);
    const std::uint64_t needed_bytes = std::min(everything_bytes, minimum_host_bytes(lanes_least));
    if (shrink_buffers(staging_wanted, lanes_wanted, lanes_least)) {
      fill_host(parameters_may_be_host, records_may_be_host,
                placement_.host_budget_bytes - placement_.host_bytes());
      return;
    }
    // State in host memory needs no buffers: all of it may fit where part of it does not.
    const std::vector<Pool> pools = placement_.pools();
    fill_host(parameters_may_be_host, records_may_be_host, UINT64_MAX);
    if (!shrink_buffers(staging_wanted, lanes_wanted, lanes_least))
      fail_budget(Tier::kHost, "memory.host", placement_.host_budget_bytes, needed_bytes, pools);
  }

  // Sizes buffers for the present homes, as close to what is wanted as the budget allows. False
  // when it does not hold one of each kind.
  bool shrink_buffers(std::uint32_t staging, std::uint32_t lanes, std::uint32_t lanes_least) {
    while (true) {
      size_buffers(staging, lanes);
      if (placement_.host_bytes() <= placement_.host_budget_bytes) return true;
      if (staging > std::max(lanes, lanes_least)) {
        --staging;
      } else if (lanes > lanes_least) {
        --lanes;
      } else if (staging > 1) {
        --staging;
      } else if (placement_.activation_staging.count > 1) {
        --placement_.activation_staging.count;
      } else if (placement_.gradient_staging.count > 1) {
        --placement_.gradient_staging.count;
      } else {
        return false;
      }
    }
  }

  void clear_records() {
    placement_.record_tier.assign(layout_.blocks().size(), Tier::kNvme);
    for (const BlockPlace& block : layout_.blocks()) {
      if (layout_.is_frozen(block.id)) placement_.record_tier[index_of(block.id)] = Tier::kHost;
    }
  }

  // Gives blocks a home in host memory from the first unit on, up to `room_bytes` beyond what is
  // already there. Parameters come first: a byte of them in RAM saves three or four bytes of
  // traffic a step (two or three reads and a write of every two), a byte of record two, one of
  // frozen parameters two reads.
  void fill_host(bool parameters, bool records, std::uint64_t room_bytes) {
    if (room_bytes == UINT64_MAX) {  // from scratch
      placement_.host_parameter_bytes = 0;
      placement_.host_record_bytes = 0;
      std::ranges::replace(placement_.parameter_tier, Tier::kHost, Tier::kNvme);
      clear_records();
    }
    const auto take = [&](Tier& tier, std::uint64_t bytes, std::uint64_t& pool_bytes) {
      if (tier != Tier::kNvme || bytes > room_bytes) return;
      tier = Tier::kHost;
      pool_bytes += bytes;
      room_bytes -= bytes;
    };
    const auto take_parameters = [&](bool frozen) {
      for (const BlockPlace& block : layout_.blocks()) {
        if (parameters && layout_.is_frozen(block.id) == frozen)
          take(placement_.parameter_tier[index_of(block.id)],
               layout_.parameter_slot_bytes(block.id), placement_.host_parameter_bytes);
      }
    };
    take_parameters(/*frozen=*/false);
    for (const BlockPlace& block : layout_.blocks()) {
      if (records)
        take(placement_.record_tier[index_of(block.id)], layout_.record_slot_bytes(block.id),
             placement_.host_record_bytes);
    }
    take_parameters(/*frozen=*/true);
  }

  std::uint32_t lanes_for_bursts() const {
    std::uint32_t blocks = 0;
    for (const UnitPlace& unit : layout_.units()) blocks = std::max(blocks, unit.block_count);
    return pass_.overlaps
               ? std::clamp(kUnitsInLanes * blocks, kLanesMinimumWanted, kLanesMaximumWanted)
               : kLanesMinimumWanted;
  }

  // Buffers for the present homes: parameter slots where parameters are not in RAM, lanes where
  // records are not. All but one of the prefetcher's slots may keep what they hold.
  void size_buffers(std::uint32_t staging_slots, std::uint32_t lanes) {
    const auto has = [](const std::vector<Tier>& tiers, Tier tier) {
      return std::ranges::count(tiers, tier) != 0;
    };
    const std::uint64_t block = largest_block();
    const StateFormat& format = layout_.format();
    const std::uint64_t parameter_slot =
        align_up(block * format.parameter_bytes(), kStorageAlignBytes);
    const bool reads_parameters = has(placement_.parameter_tier, Tier::kNvme);
    const bool updates_in_slots = reads_parameters || has(placement_.parameter_tier, Tier::kDevice);
    if (!reads_parameters) staging_slots = 0;
    placement_.parameter_slots = {.count = staging_slots + (updates_in_slots ? lanes : 0),
                                  .slot_bytes = parameter_slot};
    placement_.kept_slots = pass_.overlaps && staging_slots > 1 ? staging_slots - 1 : 0;
    const bool lanes_hold_records = has(placement_.record_tier, Tier::kNvme);
    placement_.lanes = {
        .count = lanes,
        .slot_bytes =
            lanes_hold_records ? align_up(block * format.record_bytes(), kStorageAlignBytes) : 0};
  }

  // What the present homes need with one buffer of each kind.
  std::uint64_t minimum_host_bytes(std::uint32_t lanes) {
    size_buffers(1, lanes);
    const auto surplus = [](const SlotPool& pool) {
      return pool.count == 0 ? 0 : (pool.count - 1) * pool.slot_bytes;
    };
    return placement_.host_bytes() - surplus(placement_.gradient_staging) -
           surplus(placement_.activation_staging);
  }

  std::uint64_t unit_slot_bytes(const UnitPlace& unit) const {
    return align_up(layout_.unit_parameter_bytes(unit.id), kPageAlignBytes);
  }

  std::uint64_t largest_block() const {
    std::uint64_t largest = 0;
    for (const BlockPlace& block : layout_.blocks())
      largest = std::max(largest, block.element_count);
    return largest;
  }

  // Of a unit's gradient in the set; a block, but where the set holds other ranks' parts, too.
  std::uint64_t largest_piece() const {
    std::uint64_t largest = 0;
    for (const UnitPlace& unit : layout_.units())
      largest =
          std::max(largest, std::min(layout_.block_elements(), layout_.set_elements(unit.id)));
    return largest;
  }

  static constexpr std::uint64_t kPageAlignBytes = 4096;

  const Layout& layout_;
  const ModelSpec& model_;
  const Config::Placement& choices_;
  const PassNeeds& pass_;
  Schedule schedule_;
  std::vector<std::uint64_t> sizes_ =
      unit_sizes();  // in the window, by unit; 0 once homed on the device
  Placement placement_;
  std::uint32_t activation_places_least_ = 0;

  std::vector<std::uint64_t> unit_sizes() const {
    std::vector<std::uint64_t> sizes;
    for (const UnitPlace& unit : layout_.units())
      sizes.push_back(layout_.unit_parameter_bytes(unit.id));
    return sizes;
  }
};

}  // namespace

Placement plan_placement(const Layout& layout, const ModelSpec& model,
                         const Config::Placement& choices, const Budgets& budgets,
                         const PassNeeds& pass) {
  return Planner(layout, model, choices, budgets, pass).plan();
}

void add_shadows(const Layout& layout, Placement& placement) {
  placement.storage_copies = 2;
  placement.shadow_bytes = 0;
  for (const BlockPlace& block : layout.blocks()) {
    if (placement.has_shadow(block.id))
      placement.shadow_bytes +=
          layout.parameter_slot_bytes(block.id) + layout.record_slot_bytes(block.id);
  }
}

std::vector<std::uint64_t> window_unit_bytes(const Layout& layout, const Placement& placement) {
  std::vector<std::uint64_t> bytes;
  for (const UnitPlace& unit : layout.units())
    bytes.push_back(placement.unit_is_on_device(unit) ? 0 : layout.unit_parameter_bytes(unit.id));
  return bytes;
}

}  // namespace sluice
