// The tier that is home to each block's states, and the size of every pool in every tier. The
// placement is a pure function of (layout, model, budgets, choices). Mandatory pools come first.
// The size of each is a sum in the source, whose terms are explained there. The rest of a budget is
// filled with state, and state that saves the most traffic goes first. The placement is fixed for a
// run. Because every step uses the state in the same cyclic order, a fixed choice is as good as any
// cache. A fixed choice can also be predicted and explained. Constant after construction.
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

// `count` buffers of `slot_bytes` each.
struct SlotPool {
  std::uint32_t count = 0;
  std::uint64_t slot_bytes = 0;

  std::uint64_t size_bytes() const { return count * slot_bytes; }
  bool operator==(const SlotPool&) const = default;
};

// Whether all ranks announce a unit together, or a rank does so alone (UnitSpec::is_local).
enum class AnnouncedKind : std::uint8_t { kShared, kLocal };

struct Placement {
  bool fills_device = false;  // as in PassNeeds

  // The homes, by block. If one block of a unit is at home on the device, all blocks of the unit
  // are at home there. Frozen blocks have no record. Host memory counts as the home of the missing
  // record. If a record is at home on the device, its parameters and gradients are there too, and
  // the unit is updated there.
  std::vector<Tier> parameter_tier;
  std::vector<Tier> record_tier;
  // The tier in which a step's gradients wait for the update, for each unit. Frozen units have no
  // gradients, and their entry is host memory.
  std::vector<Tier> gradient_tier;

  // Whether the device's memory is host memory that the engine may use in place. In-place use needs
  // memory.unified and a single rank. Then computation uses a unit's parameters at their home if
  // all of the parameters are in host memory. An update uses a unit's parameters at their home if
  // the parameters are on the device.
  bool is_unified = false;
  std::vector<bool> is_leased_in_host;  // by unit; empty: no unit is
  // Whether a unit's first gradient of a step may be computed straight in the set. Such a gradient
  // needs a set whose part is in host memory.
  bool leases_gradient_set = false;

  // Device memory.
  std::uint64_t device_budget_bytes = 0;
  std::uint64_t resident_parameter_bytes = 0;  // homed there: whole units, or shards of them
  std::uint64_t window_bytes = 0;              // units that come and go
  SlotPool announced_window;                   // announced units, which come and go as well
  // Whether the second half of these places is for local units. Ranks fetch their local units at
  // different times, and fetch the others together.
  bool splits_announced_window = false;
  SlotPool gradient_slots;  // gradients of the units in backward, before they are drained
  std::uint32_t local_gradient_slots = 0;   // the last of them, for local units
  std::uint64_t device_gradient_bytes = 0;  // gradients that wait there
  std::uint64_t device_record_bytes = 0;    // of units that are updated there
  // The device's tallies of units whose gradients wait on the device (tally_bytes_of()). Host
  // memory has the same number of bytes to receive the tallies.
  std::uint64_t tally_bytes = 0;
  std::uint64_t rank_buffer_bytes = 0;  // for the ranks (rank_buffer_bytes()), beside the slab

  // Host memory.
  std::uint64_t host_budget_bytes = 0;
  std::uint64_t gradient_set_bytes = 0;  // one gradient for every element that waits here
  SlotPool gradient_staging;  // pieces of gradients to be added, or on their way to their place
  std::uint64_t host_parameter_bytes = 0;
  std::uint64_t host_record_bytes = 0;
  // The buffers of parameters on their way between storage, device and update. Each lane has a
  // slot, and the rest is for the prefetcher.
  SlotPool parameter_slots;
  std::uint32_t kept_slots = 0;  // how many of the rest may keep bytes for a later use
  SlotPool lanes;                // records of the blocks in the optimizer pass
  SlotPool lane_gradients;       // gradients of these blocks that do not wait in host memory
  SlotPool commit_buffers;       // blocks on their way from the device into a commit
  SlotPool save_buffers;         // blocks on their way into a checkpoint beside training

  // The buffers of boundary activations, if the engine keeps them. There is a window on the device.
  // Homes in host memory or on storage are for activations that have to leave the window.
  ActivationHomes activation_homes;
  SlotPool activation_window;
  std::uint64_t host_activation_bytes = 0;
  SlotPool activation_staging;  // pieces between the device and storage

  // Storage. With two copies, a block whose parameters and record are both on storage has a shadow,
  // a second place beside its home. So an update can be tentative.
  std::uint32_t storage_copies = 1;
  std::uint64_t shadow_bytes = 0;
  std::uint64_t nvme_parameter_bytes = 0;  // of one copy
  std::uint64_t nvme_record_bytes = 0;
  std::uint64_t nvme_gradient_bytes = 0;
  std::uint64_t nvme_activation_bytes = 0;
  // With a durable store, every plane has durable_copies copies on storage, wherever the plane's
  // home is. 0 means that the state is scratch. The copies take durable_bytes, in addition to the
  // homes and shadows on storage.
  std::uint32_t durable_copies = 0;
  std::uint64_t durable_bytes = 0;
  std::uint64_t commit_bytes = 0;  // written by a commit, of state at home in memory

  // Whether a step updates only the units that it uses in backward (optimizer.untouched). The
  // updates of the other units are missing for good, or are made later.
  bool skips_untouched = false;
  bool is_lazy = false;

  // Whether a step leaves the unit as it is if the step does not use the unit in backward. If some
  // of the unit is in memory, updating the unit later would save nothing.
  bool may_stay(const UnitPlace& unit) const {
    if (!is_lazy) return skips_untouched;
    const auto is_on_storage = [&](const std::vector<Tier>& tiers) {
      const auto first = tiers.begin() + unit.first_block;
      return std::all_of(first, first + unit.block_count,
                         [](Tier tier) { return tier == Tier::kNvme; });
    };
    return is_on_storage(parameter_tier) && is_on_storage(record_tier);
  }
  // The places of announced units of one kind in the announced window.
  std::uint32_t announced_places() const {
    return announced_window.count / (splits_announced_window ? 2 : 1);
  }
  std::uint32_t first_announced_place(AnnouncedKind kind) const {
    return splits_announced_window && kind == AnnouncedKind::kLocal ? announced_places() : 0;
  }
  // Whether the unit's parameters that this rank owns are at home on the device.
  bool is_homed_on_device(const UnitPlace& unit) const {
    return parameter_tier[unit.first_block] == Tier::kDevice;
  }
  // Whether all of the unit's parameters are at home on the device, so that the unit needs no place
  // in the window.
  bool unit_is_on_device(const UnitPlace& unit) const {
    return is_homed_on_device(unit) && !unit.is_sharded;
  }
  // Whether leases use the unit at its home, in host or device memory. An update of a block then
  // has to wait for the leases on the block's unit.
  bool is_leased_at_home(const UnitPlace& unit) const {
    return unit_is_on_device(unit) ||
           (!is_leased_in_host.empty() && is_leased_in_host[index_of(unit.id)]);
  }
  // Whether the CPU reads and writes the block's parameters at their home, without a copy.
  bool updates_parameters_at_home(BlockId block) const {
    const Tier tier = parameter_tier[index_of(block)];
    return tier == Tier::kHost || (tier == Tier::kDevice && is_unified);
  }
  // Whether the unit's optimizer state is at home on the device, so that the device updates the
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
  // Whether some gradients come to a lane from outside host memory.
  bool gradients_leave() const { return lane_gradients.count != 0; }
  // The bytes of the device's pools, which the tiers cut from one slab. The function device_bytes()
  // returns the sum of these bytes and the ranks' memory.
  std::uint64_t device_slab_bytes() const {
    return resident_parameter_bytes + window_bytes + announced_window.size_bytes() +
           gradient_slots.size_bytes() + device_gradient_bytes + device_record_bytes + tally_bytes +
           activation_window.size_bytes();
  }
  std::uint64_t device_bytes() const { return device_slab_bytes() + rank_buffer_bytes; }
  std::uint64_t host_bytes() const {
    return gradient_set_bytes + gradient_staging.size_bytes() + host_parameter_bytes +
           host_record_bytes + host_activation_bytes + tally_bytes + parameter_slots.size_bytes() +
           lanes.size_bytes() + lane_gradients.size_bytes() + activation_staging.size_bytes() +
           commit_buffers.size_bytes() + save_buffers.size_bytes();
  }
  bool has_shadow(BlockId block) const {
    return storage_copies == 2 && parameter_tier[index_of(block)] == Tier::kNvme &&
           record_tier[index_of(block)] == Tier::kNvme;
  }
  // Bytes at rest.
  std::uint64_t nvme_bytes() const {
    return nvme_parameter_bytes + nvme_record_bytes + nvme_gradient_bytes + nvme_activation_bytes +
           shadow_bytes + durable_bytes;
  }
  std::vector<Pool> pools() const;
  bool operator==(const Placement&) const = default;
};

// A checkpoint has pieces of at most this many elements of a tensor, each with a checksum.
inline constexpr std::uint64_t kSavedPieceElements = 1 << 20;

// The memory in which a thread prepares the bytes of one block for a checkpoint.
struct SaveRoom {
  std::uint64_t write_bytes = 0;    // for whole pages on their way to the drive
  std::uint64_t decoded_bytes = 0;  // for a piece of smaller moments
  std::uint64_t size_bytes() const { return write_bytes + decoded_bytes; }
};
SaveRoom save_room(const Layout& layout);

struct Budgets {
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
};

// The properties of a step that buffers depend on.
struct PassNeeds {
  bool overlaps = false;                    // with computation: buffers for bursts and kept bytes
  std::optional<std::uint32_t> lanes = {};  // empty = as many as help
  // Whether the planner may give the device's remaining memory to optimizer state, if the config
  // leaves this choice open.
  bool fills_device = false;
  Config::Activations activations = {};
  std::uint64_t rank_buffer_bytes = 0;  // device memory that ranks take beside the pools
  bool is_durable = false;              // commits also take the device's state
  bool is_unified = false;              // as in Placement
  bool is_alone = true;                 // one rank
  std::uint32_t save_buffers = 0;
};

// The needs of `config` on each of `ranks` ranks. If the device has its own memory, the planner
// fills it.
PassNeeds pass_needs(const Config& config, const Layout& layout, std::uint32_t ranks,
                     bool device_is_host);

// The function tries to place the state under `budgets`. If a pair of budgets works, every pair of
// larger budgets works, too.
// Fails with kOutOfMemory if a budget cannot hold its mandatory pools, or the state that `choices`
// assigns to the budget's tier. The message lists the pools. The message names the smallest budget
// that works while the other budget stays as it is. If no size of this budget alone works, the
// message names a pair of budgets.
Placement plan_placement(const Layout& layout, const ModelSpec& model,
                         const Config::Placement& choices, const Budgets& budgets,
                         const PassNeeds& pass = {});

// The length of the device's report about a unit whose gradients wait on the device. The report has
// the sum of squares, as fp64, of each leaf that this rank owns. The report also has 32 bits that
// say whether an update has made a weight overflow.
std::uint64_t tally_bytes_of(const UnitPlace& unit);

// Gives a shadow to every block that can have one.
void add_shadows(const Layout& layout, Placement& placement);
// Whether add_shadows() would give a shadow to every trained block, and every gradient would wait
// in host memory. Every update can then be tentative, which is a condition for "auto" to speculate.
bool shadows_serve_all(const Layout& layout, Placement placement);

// Gives a durable store `count` copies of all of the state (durable_copies()).
// Requires: add_shadows() has been called already if shadows are needed.
void add_copies(const Layout& layout, std::uint32_t count, Placement& placement);
// The number of copies that `config` needs. One copy is named by the last commit, and a second copy
// is written by updates. A tentative update needs a third copy while neither the first copy nor the
// second copy may be overwritten.
std::uint32_t durable_copies(const Config& config, std::uint32_t ranks);
// Whether "auto" may speculate. With a durable store, "auto" may speculate only where no third copy
// is needed.
bool may_speculate_by_itself(const Config& config, std::uint32_t ranks);
// The bytes that each unit needs in the device window. A unit that is leased at home needs 0 bytes.
std::vector<std::uint64_t> window_unit_bytes(const Layout& layout, const Placement& placement);

}  // namespace sluice
