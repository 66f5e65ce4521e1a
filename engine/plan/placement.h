// The placement says which tier is the home of each block's states, and how large every pool in
// every tier is. The placement is a pure function of (layout, model, budgets, choices). Mandatory
// pools come first. The size of each mandatory pool is a sum. Comments in the source explain the
// terms of these sums. The rest of a budget is filled with state. The state that saves the most
// traffic comes first. The placement is fixed for a run. Because every step uses the state in the
// same cyclic order, a fixed choice is as good as any cache. A fixed choice can also be predicted
// and explained. A placement is constant after construction.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/memory_marks.h>
#include <sluice/model_spec.h>
#include <sluice/plan.h>
#include "engine/plan/activation_plan.h"
#include "engine/plan/layout.h"

namespace sluice {

// A pool of `count` buffers. Each buffer has `slot_bytes` bytes.
struct SlotPool {
  std::uint32_t count = 0;
  std::uint64_t slot_bytes = 0;

  std::uint64_t size_bytes() const { return count * slot_bytes; }
  bool operator==(const SlotPool&) const = default;
};

// A unit of the kind kShared is announced by all ranks together. A unit of the kind kLocal is
// announced by one rank alone (UnitSpec::is_local).
enum class AnnouncedKind : std::uint8_t { kShared, kLocal };

struct Placement {
  bool fills_device = false;  // as in PassNeeds

  // The homes, by block. If one block of a unit is at home on the device, all blocks of the unit
  // are at home there. Frozen blocks have no record. Host memory counts as the home of the missing
  // record. If a record is at home on the device, the block's parameters and gradients are on the
  // device, too. The device then updates the unit.
  std::vector<Tier> parameter_tier;
  std::vector<Tier> record_tier;
  // For each unit, the tier in which a step's gradients wait for the update. Frozen units have no
  // gradients. The entry of a frozen unit is host memory.
  std::vector<Tier> gradient_tier;

  // Whether the device's memory is host memory that the engine may use in place. In-place use needs
  // memory.unified and a single rank. With in-place use, computation uses a unit's parameters at
  // their home if all of the parameters are in host memory. An update uses a unit's parameters at
  // their home if the parameters are on the device.
  bool is_unified = false;
  std::vector<bool> is_leased_in_host;  // by unit; if empty, no unit is leased there
  // Whether a unit's first gradient of a step may be computed directly in the gradient set. This is
  // possible only for units whose gradients wait in host memory.
  bool leases_gradient_set = false;

  // Whether the device updates blocks that are not at home there (optimizer.update_on "device").
  // Each of these blocks passes through a slot of `update_staging`.
  bool streams_updates = false;
  // Whether an update on the device reads waiting gradients directly from their place on the
  // device. The gradients are then not copied to a lane.
  bool streams_device_gradients = false;

  // Device memory.
  std::uint64_t device_budget_bytes = 0;
  std::uint64_t resident_parameter_bytes = 0;  // parameters at home there: whole units or shards
  std::uint64_t window_bytes = 0;              // window for units that come and go
  SlotPool announced_window;                   // places for announced units that come and go
  // Whether the second half of the places in the announced window is for local units. Ranks fetch
  // their local units at different times. Ranks fetch all other units together.
  bool splits_announced_window = false;
  SlotPool gradient_slots;  // gradients of units in the backward pass, before they are drained
  std::uint32_t local_gradient_slots = 0;   // the last slots are for local units
  std::uint64_t device_gradient_bytes = 0;  // gradients that wait there
  std::uint64_t device_record_bytes = 0;    // records of units that are updated there
  SlotPool update_staging;  // blocks that are here only for their update (update_slot())
  // The bytes of the device's tallies (tally_bytes_of()). There is a tally for each unit whose
  // gradients wait on the device. Host memory has the same number of bytes to receive the tallies.
  std::uint64_t tally_bytes = 0;
  std::uint64_t rank_buffer_bytes = 0;  // for ranks (rank_buffer_bytes()); not in the slab

  // Host memory.
  std::uint64_t host_budget_bytes = 0;
  std::uint64_t gradient_set_bytes = 0;  // the gradients that wait in host memory
  SlotPool gradient_staging;  // pieces of gradients that will be added or are moving home
  std::uint64_t host_parameter_bytes = 0;
  std::uint64_t host_record_bytes = 0;
  // The buffers for parameters that move between storage, the device and the update. Each lane has
  // one of these slots. The remaining slots are for the prefetcher.
  SlotPool parameter_slots;
  std::uint32_t kept_slots = 0;  // remaining slots that may keep bytes for a later use
  SlotPool lanes;                // records of the blocks in the optimizer pass
  SlotPool lane_gradients;       // for gradients that lanes fetch from outside host memory
  SlotPool commit_buffers;       // blocks on their way from the device into a commit
  SlotPool save_buffers;         // blocks on their way into a checkpoint during training

  // The buffers of boundary activations. The buffers exist only if the engine keeps these
  // activations. The device has a window for activations. Activations that have to leave the window
  // have homes in host memory or on storage.
  ActivationHomes activation_homes;
  SlotPool activation_window;
  std::uint64_t host_activation_bytes = 0;
  SlotPool activation_staging;  // pieces on their way between device and storage

  // Storage. With two copies, a block has a shadow if both its parameters and its record are on
  // storage. The shadow is a second place on storage, in addition to the block's home. So an update
  // of the block can be tentative.
  std::uint32_t storage_copies = 1;
  std::uint64_t shadow_bytes = 0;
  std::uint64_t nvme_parameter_bytes = 0;  // of one copy
  std::uint64_t nvme_record_bytes = 0;
  std::uint64_t nvme_gradient_bytes = 0;
  std::uint64_t nvme_activation_bytes = 0;
  // With a durable store, every plane has durable_copies copies on storage, wherever the plane's
  // home is. If durable_copies is 0, the state lies in scratch files. The copies take durable_bytes
  // bytes, in addition to the homes and shadows on storage.
  std::uint32_t durable_copies = 0;
  std::uint64_t durable_bytes = 0;
  std::uint64_t commit_bytes = 0;  // written by a commit, for state at home in memory

  // Whether a step updates only the units that its backward pass uses (optimizer.untouched). The
  // other units miss the update. If is_lazy is set, the other units make up for the update later.
  bool skips_untouched = false;
  bool is_lazy = false;

  // Returns true if a step leaves an unused unit unchanged. A unit is unused if the backward pass
  // of the step does not use the unit. With is_lazy, only units that are completely on storage stay
  // unchanged. If part of a unit were in memory, a late update would save no traffic.
  bool may_stay(const UnitPlace& unit) const {
    if (!is_lazy) return skips_untouched;
    const auto is_on_storage = [&](const std::vector<Tier>& tiers) {
      const auto first = tiers.begin() + unit.first_block;
      return std::all_of(first, first + unit.block_count,
                         [](Tier tier) { return tier == Tier::kNvme; });
    };
    return is_on_storage(parameter_tier) && is_on_storage(record_tier);
  }
  // The number of places in the announced window for announced units of one kind.
  std::uint32_t announced_places() const {
    return announced_window.count / (splits_announced_window ? 2 : 1);
  }
  std::uint32_t first_announced_place(AnnouncedKind kind) const {
    return splits_announced_window && kind == AnnouncedKind::kLocal ? announced_places() : 0;
  }
  // Whether this rank's part of the unit's parameters is at home on the device.
  bool is_homed_on_device(const UnitPlace& unit) const {
    return parameter_tier[unit.first_block] == Tier::kDevice;
  }
  // Whether all of the unit's parameters are at home on the device. Such a unit needs no place in
  // the window.
  bool unit_is_on_device(const UnitPlace& unit) const {
    return is_homed_on_device(unit) && !unit.is_sharded;
  }
  // Whether leases use the unit directly at its home, in host memory or device memory. If so, an
  // update of a block has to wait for the leases on the block's unit.
  bool is_leased_at_home(const UnitPlace& unit) const {
    return unit_is_on_device(unit) ||
           (!is_leased_in_host.empty() && is_leased_in_host[index_of(unit.id)]);
  }
  // Whether the CPU reads and writes the block's parameters at their home, without a copy.
  bool updates_parameters_at_home(BlockId block) const {
    const Tier tier = parameter_tier[index_of(block)];
    return tier == Tier::kHost || (tier == Tier::kDevice && is_unified);
  }
  // Whether an update of the block needs a slot for the block's parameters. If the device makes the
  // update, and the home of the parameters is the device, the update needs no slot.
  bool update_takes_slot(BlockId block) const {
    if (streams_updates && parameter_tier[index_of(block)] == Tier::kDevice) return false;
    return !updates_parameters_at_home(block);
  }
  // Whether the unit's optimizer state is at home on the device. If so, the device updates the
  // unit.
  bool is_updated_on_device(const UnitPlace& unit) const {
    return record_tier[unit.first_block] == Tier::kDevice;
  }
  // Whether the unit's gradients wait outside host memory.
  bool gradient_leaves(UnitId unit) const { return gradient_tier[index_of(unit)] != Tier::kHost; }
  bool gradient_is_on_device(UnitId unit) const {
    return gradient_tier[index_of(unit)] == Tier::kDevice;
  }
  bool gradient_spills(UnitId unit) const { return gradient_tier[index_of(unit)] == Tier::kNvme; }
  // Whether a lane needs a copy of the unit's gradients for the update.
  bool lane_fetches_gradients(UnitId unit) const {
    return gradient_spills(unit) || (gradient_is_on_device(unit) && !streams_updates);
  }
  // Whether some gradients of blocks in lanes wait outside host memory.
  bool gradients_leave() const { return lane_gradients.count != 0 || streams_device_gradients; }
  // Whether the device does arithmetic on gradients or on state.
  bool uses_device_math() const { return tally_bytes != 0 || update_staging.count != 0; }
  // The bytes of the host's copies of the update flags. An update flag says whether an update on
  // the device has overflowed.
  std::uint64_t update_flag_bytes() const {
    return update_staging.count == 0 ? 0 : kStorageAlignBytes;
  }
  // The bytes of all pools of the device. The tiers cut these pools from one slab. device_bytes()
  // returns the sum of these bytes and the ranks' memory.
  std::uint64_t device_slab_bytes() const {
    return resident_parameter_bytes + window_bytes + announced_window.size_bytes() +
           gradient_slots.size_bytes() + device_gradient_bytes + device_record_bytes + tally_bytes +
           update_staging.size_bytes() + activation_window.size_bytes();
  }
  std::uint64_t device_bytes() const { return device_slab_bytes() + rank_buffer_bytes; }
  std::uint64_t host_bytes() const {
    return gradient_set_bytes + gradient_staging.size_bytes() + host_parameter_bytes +
           host_record_bytes + host_activation_bytes + tally_bytes + update_flag_bytes() +
           parameter_slots.size_bytes() + lanes.size_bytes() + lane_gradients.size_bytes() +
           activation_staging.size_bytes() + commit_buffers.size_bytes() +
           save_buffers.size_bytes();
  }
  bool has_shadow(BlockId block) const {
    return storage_copies == 2 && parameter_tier[index_of(block)] == Tier::kNvme &&
           record_tier[index_of(block)] == Tier::kNvme;
  }
  // All bytes that the placement takes on storage.
  std::uint64_t nvme_bytes() const {
    return nvme_parameter_bytes + nvme_record_bytes + nvme_gradient_bytes + nvme_activation_bytes +
           shadow_bytes + durable_bytes;
  }
  std::vector<Pool> pools() const;
  bool operator==(const Placement&) const = default;
};

// A checkpoint contains each tensor in pieces. Each piece has its own checksum, and has at most
// this number of elements.
inline constexpr std::uint64_t kSavedPieceElements = 1 << 20;

// The memory in which a thread prepares the bytes of one block for a checkpoint.
struct SaveRoom {
  std::uint64_t write_bytes = 0;    // for whole pages on their way to the drive
  std::uint64_t decoded_bytes = 0;  // for a piece of moments that are not fp32
  std::uint64_t size_bytes() const { return write_bytes + decoded_bytes; }
};
SaveRoom save_room(const Layout& layout);

struct Budgets {
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
};

// The properties of a step that determine the sizes of buffers.
struct PassNeeds {
  bool overlaps = false;                    // updates overlap computation and so need more buffers
  std::optional<std::uint32_t> lanes = {};  // empty = as many as are useful
  // Whether the planner may use the device's remaining memory for optimizer state, if the config
  // leaves this choice to the planner.
  bool fills_device = false;
  Config::Activations activations = {};
  std::uint64_t rank_buffer_bytes = 0;  // device memory that ranks take in addition to the pools
  bool is_durable = false;              // commits include the state on the device
  bool is_unified = false;              // as in Placement
  bool is_alone = true;                 // one rank
  bool streams_updates = false;         // as in Placement
  std::uint32_t save_buffers = 0;
};

// Returns the needs that follow from `config`, for one of `ranks` ranks. If the device has its own
// memory, the planner may fill this memory with optimizer state.
PassNeeds pass_needs(const Config& config, const Layout& layout, std::uint32_t ranks,
                     bool device_is_host);

// The function tries to place the state under `budgets`. If a pair of budgets works, every pair of
// larger budgets works, too.
// Fails with kOutOfMemory if a budget is too small. A budget must hold the mandatory pools of its
// tier, and the state that `choices` assigns to this tier. The message lists the pools. The message
// names the smallest budget that works while the other budget stays as it is. If no size of this
// budget alone works, the message names a pair of budgets.
Placement plan_placement(const Layout& layout, const ModelSpec& model,
                         const Config::Placement& choices, const Budgets& budgets,
                         const PassNeeds& pass = {});

// The length of a tally. A tally is the device's report about a unit whose gradients wait on the
// device. For each leaf that this rank owns, the tally has the sum of squares, as fp64. The tally
// also has 32 bits that say whether a weight has overflowed in an update.
std::uint64_t tally_bytes_of(const UnitPlace& unit);

// The places of the parts in a slot of Placement::update_staging. The parts are a block's
// parameters, record and gradients, and the flag of the block's update.
struct UpdateSlot {
  std::uint64_t record_offset = 0;
  std::uint64_t gradient_offset = 0;
  std::uint64_t flag_offset = 0;
  std::uint64_t size_bytes = 0;
};
UpdateSlot update_slot(const Layout& layout);

// Gives a shadow to every block that can have a shadow.
void add_shadows(const Layout& layout, Placement& placement);
// Whether two conditions would hold after add_shadows(): every trained block has a shadow, and
// every gradient waits in host memory. If both conditions hold, every update can be tentative. The
// policy "auto" speculates only in this case.
bool shadows_serve_all(const Layout& layout, Placement placement);

// Gives a durable store `count` copies of all of the state (durable_copies()).
// Requires: add_shadows() has been called already if shadows are needed.
void add_copies(const Layout& layout, std::uint32_t count, Placement& placement);
// The number of copies that `config` needs. One copy is named by the last commit, and a second copy
// is written by updates. Tentative updates may need a third copy. The reason is that at some times
// neither the first nor the second copy may be overwritten.
std::uint32_t durable_copies(const Config& config, std::uint32_t ranks);
// Whether the policy "auto" may speculate. With a durable store, the policy "auto" may speculate
// only if speculation needs no third copy of the state.
bool may_speculate_by_itself(const Config& config, std::uint32_t ranks);
// The bytes that each unit needs in the device window. A unit that is leased at home needs 0 bytes.
std::vector<std::uint64_t> window_unit_bytes(const Layout& layout, const Placement& placement);

}  // namespace sluice
