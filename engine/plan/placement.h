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
  // are at home there. Frozen blocks have no record. `record_tier` names host memory for each
  // frozen block. If a record is at home on the device, the block's parameters and gradients are on
  // the device, too. The device then updates the unit.
  std::vector<Tier> parameter_tier;
  std::vector<Tier> record_tier;
  // The list says in which tier each unit's gradients wait for the update. Frozen units have no
  // gradients. `gradient_tier` names host memory for each frozen unit.
  std::vector<Tier> gradient_tier;

  // Whether the device's memory is host memory that the engine may use in place. The flag is true
  // only with a single rank, and only if memory.unified is not "off". With in-place use,
  // computation uses a unit's parameters at their home if all of the parameters are in host memory.
  // An update uses a unit's parameters at their home if the parameters are on the device.
  bool is_unified = false;
  std::vector<bool> is_leased_in_host;  // by unit; if empty, no unit is leased there
  // Whether a unit's first gradient of a step may be computed directly in the gradient set. This is
  // possible only for units whose gradients wait in host memory.
  bool leases_gradient_set = false;

  // Whether the device also updates blocks that have their home in another tier
  // (optimizer.update_on "device"). Each of these blocks passes through a slot of `update_staging`.
  bool streams_updates = false;
  // True if updates on the device read gradients directly from the place where the gradients wait.
  // The gradients are then not copied to a lane.
  bool streams_device_gradients = false;

  // Device memory.
  std::uint64_t device_budget_bytes = 0;
  std::uint64_t resident_parameter_bytes = 0;  // parameters at home there: whole units or shards
  std::uint64_t window_bytes = 0;              // window for units that come and go
  SlotPool announced_window;                   // places for announced units that come and go
  // True if the announced window reserves the second half of its places for local units. Ranks
  // fetch their local units at different times. Ranks fetch all other units together.
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
  // With a durable store, storage has `durable_copies` copies of every plane, even of a plane that
  // has its home in memory. If durable_copies is 0, the state lies in scratch files.
  // `durable_bytes` is the size of the copies that are neither homes nor shadows on storage.
  std::uint32_t durable_copies = 0;
  std::uint64_t durable_bytes = 0;
  std::uint64_t commit_bytes = 0;  // written by a commit, for state at home in memory

  // Whether a step updates only the units that its backward pass uses (optimizer.untouched). The
  // step does not update the other units. If `is_lazy` is true, a unit receives a missed update
  // later.
  bool skips_untouched = false;
  bool is_lazy = false;

  // Returns true if a step leaves an unused unit unchanged. A unit is unused if the backward pass
  // of the step does not use the unit. If `is_lazy` is true, a unit stays unchanged only if the
  // whole unit is on storage. If part of a unit were in memory, a late update would save no
  // traffic.
  bool may_stay(const UnitPlace& unit) const {
    if (!is_lazy) return skips_untouched;
    const auto is_on_storage = [&](const std::vector<Tier>& tiers) {
      const auto first = tiers.begin() + unit.first_block;
      return std::all_of(first, first + unit.block_count,
                         [](Tier tier) { return tier == Tier::kNvme; });
    };
    return is_on_storage(parameter_tier) && is_on_storage(record_tier);
  }
  // Returns the number of places that the announced window has for each kind of announced unit.
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
  // Whether leases use the unit directly in its home (host memory or device memory), without a
  // copy. If so, an update of a block has to wait for the leases on the block's unit.
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
  // Whether a block in a lane may have gradients that wait outside host memory.
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
  // True if the planner may put optimizer state into the device's remaining memory. The flag
  // matters only if the config leaves this choice to the planner.
  bool fills_device = false;
  Config::Activations activations = {};
  std::uint64_t rank_buffer_bytes = 0;  // device memory that ranks take in addition to the pools
  bool is_durable = false;              // commits include the state on the device
  bool is_unified = false;              // as in Placement
  bool is_alone = true;                 // one rank
  bool streams_updates = false;         // as in Placement
  std::uint32_t save_buffers = 0;
};

// Returns the needs of one rank in a run with `config`. The run has `ranks` ranks. If the device
// has its own memory, the planner may fill this memory with optimizer state.
PassNeeds pass_needs(const Config& config, const Layout& layout, std::uint32_t ranks,
                     bool device_is_host);

// The function tries to place the state under `budgets`. If a pair of budgets works, every pair of
// larger budgets works, too.
// Fails with kOutOfMemory if a budget is too small. A budget must hold the mandatory pools of its
// tier, and the state that `choices` assigns to this tier. The message lists the pools. The message
// names the smallest budget that works while the other budget stays as it is. If no change of one
// budget is enough, the message names a pair of budgets that works.
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
// Returns whether every update can be tentative after add_shadows(). Every trained block must then
// have a shadow, and every gradient must wait in host memory. The policy "auto" speculates only in
// this case.
bool shadows_serve_all(const Layout& layout, Placement placement);

// Plans `count` copies of the whole state in the durable store. durable_copies() returns this
// number.
// Requires: add_shadows() has been called already if shadows are needed.
void add_copies(const Layout& layout, std::uint32_t count, Placement& placement);
// Returns how many copies of the state a durable store needs under `config`. The last commit names
// one copy, and updates write a second copy. Tentative updates may need a third copy. At some
// times, updates must not overwrite either of the other two copies.
std::uint32_t durable_copies(const Config& config, std::uint32_t ranks);
// Whether the policy "auto" may speculate. With a durable store, the policy "auto" may speculate
// only if speculation needs no third copy of the state.
bool may_speculate_by_itself(const Config& config, std::uint32_t ranks);
// The bytes that each unit needs in the device window. A unit needs 0 bytes if leases use the unit
// directly in its home.
std::vector<std::uint64_t> window_unit_bytes(const Layout& layout, const Placement& placement);

}  // namespace sluice
