// Which tier is home to each block's states, and how large every pool in every tier is: a pure
// function of (layout, model, budgets, choices). Mandatory pools come first, each one commented
// sum; what is left of a budget is filled with state in the order of the traffic that it saves.
// Static for a run: the state is used in the same cyclic order every step, where a fixed choice is
// as good as any cache and can be predicted and explained. Constant after construction.
#pragma once

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

struct Placement {
  bool fills_device = false;  // as PassNeeds has it

  // Homes, by block; on the device, for all blocks of a unit. Of frozen blocks, which have no
  // record, its home is host memory. Where it is the device, parameters and gradients are there
  // too: the unit is updated there.
  std::vector<Tier> parameter_tier;
  std::vector<Tier> record_tier;
  // Where a step's gradients wait for the update, by unit; of frozen ones, which have none, host
  // memory.
  std::vector<Tier> gradient_tier;

  // Device memory.
  std::uint64_t device_budget_bytes = 0;
  std::uint64_t resident_parameter_bytes = 0;  // homed there: whole units, or shards of them
  std::uint64_t window_bytes = 0;              // units that come and go
  SlotPool gradient_slots;  // gradients of the units in backward, before they are drained
  std::uint64_t device_gradient_bytes = 0;  // those that wait there
  std::uint64_t device_record_bytes = 0;    // of units that are updated there
  // What the device says of units whose gradients wait there (tally_bytes_of()), and as much host
  // memory for it to arrive in.
  std::uint64_t tally_bytes = 0;
  std::uint64_t rank_buffer_bytes = 0;  // what ranks talk in (rank_buffer_bytes()), beside the slab

  // Host memory.
  std::uint64_t host_budget_bytes = 0;
  std::uint64_t gradient_set_bytes = 0;  // one gradient for every element that waits here
  SlotPool gradient_staging;  // pieces of gradients to be added, or on their way to where they wait
  std::uint64_t host_parameter_bytes = 0;
  std::uint64_t host_record_bytes = 0;
  SlotPool parameter_slots;  // parameters on their way between storage, device and update: one for
                             // each lane, the rest for the prefetcher
  std::uint32_t kept_slots = 0;  // of the rest, how many may keep bytes for a later use
  SlotPool lanes;                // records of the blocks in the optimizer pass
  SlotPool lane_gradients;       // and the gradients of those that do not wait in host memory
  SlotPool commit_buffers;       // blocks on their way from the device into a commit

  // Boundary activations, where the engine keeps them: in a window on the device, and in homes in
  // host memory or on storage for what has to leave it.
  ActivationHomes activation_homes;
  SlotPool activation_window;
  std::uint64_t host_activation_bytes = 0;
  SlotPool activation_staging;  // pieces between the device and storage

  // Storage. With two copies, blocks whose parameters and record are both there have a shadow
  // beside their home, so that their update can be tentative.
  std::uint32_t storage_copies = 1;
  std::uint64_t shadow_bytes = 0;
  std::uint64_t nvme_parameter_bytes = 0;  // of one copy
  std::uint64_t nvme_record_bytes = 0;
  std::uint64_t nvme_gradient_bytes = 0;
  std::uint64_t nvme_activation_bytes = 0;
  // With a durable store every plane has so many copies on storage, wherever its home is (0: the
  // state is scratch), and they take so much beside the homes and shadows there.
  std::uint32_t durable_copies = 0;
  std::uint64_t durable_bytes = 0;
  std::uint64_t commit_bytes = 0;  // that a commit writes of state at home in memory

  // What this rank keeps of the unit's parameters is at home on the device.
  bool is_homed_on_device(const UnitPlace& unit) const {
    return parameter_tier[unit.first_block] == Tier::kDevice;
  }
  // And that is all of them: it needs no place in the window.
  bool unit_is_on_device(const UnitPlace& unit) const {
    return is_homed_on_device(unit) && !unit.is_sharded;
  }
  // Its optimizer state is at home on the device, which updates it.
  bool is_updated_on_device(const UnitPlace& unit) const {
    return record_tier[unit.first_block] == Tier::kDevice;
  }
  // The unit's gradients wait elsewhere than in host memory.
  bool gradient_leaves(UnitId unit) const { return gradient_tier[index_of(unit)] != Tier::kHost; }
  bool gradient_is_on_device(UnitId unit) const {
    return gradient_tier[index_of(unit)] == Tier::kDevice;
  }
  bool gradient_spills(UnitId unit) const { return gradient_tier[index_of(unit)] == Tier::kNvme; }
  // Some come to a lane for their update from there.
  bool gradients_leave() const { return lane_gradients.count != 0; }
  // Of the device: the pools that the tiers cut from one slab, and those with what ranks take.
  std::uint64_t device_slab_bytes() const {
    return resident_parameter_bytes + window_bytes + gradient_slots.size_bytes() +
           device_gradient_bytes + device_record_bytes + tally_bytes +
           activation_window.size_bytes();
  }
  std::uint64_t device_bytes() const { return device_slab_bytes() + rank_buffer_bytes; }
  std::uint64_t host_bytes() const {
    return gradient_set_bytes + gradient_staging.size_bytes() + host_parameter_bytes +
           host_record_bytes + host_activation_bytes + tally_bytes + parameter_slots.size_bytes() +
           lanes.size_bytes() + lane_gradients.size_bytes() + activation_staging.size_bytes() +
           commit_buffers.size_bytes();
  }
  bool has_shadow(BlockId block) const {
    return storage_copies == 2 && parameter_tier[index_of(block)] == Tier::kNvme &&
           record_tier[index_of(block)] == Tier::kNvme;
  }
  // At rest.
  std::uint64_t nvme_bytes() const {
    return nvme_parameter_bytes + nvme_record_bytes + nvme_gradient_bytes + nvme_activation_bytes +
           shadow_bytes + durable_bytes;
  }
  std::vector<Pool> pools() const;
  bool operator==(const Placement&) const = default;
};

struct Budgets {
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;
};

// How a step runs, as far as buffers depend on it.
struct PassNeeds {
  bool overlaps = false;                    // with computation: buffers for bursts, and for keeping
  std::optional<std::uint32_t> lanes = {};  // nothing = as many as help
  // What the device has left may take optimizer state, if the choice is the planner's.
  bool fills_device = false;
  Config::Activations activations = {};
  std::uint64_t rank_buffer_bytes = 0;  // device memory that ranks take beside the pools
  bool is_durable = false;              // commits take the state of the device, too
};

// What `config` asks for, of each of `ranks` ranks.
PassNeeds pass_needs(const Config& config, const Layout& layout, std::uint32_t ranks,
                     bool fills_device);

// Whoever has budgets that work may raise either of them: they still work.
// Fails with: kOutOfMemory when a budget cannot hold its mandatory pools, or what `choices` puts
// there; the message lists the pools and names the smallest budget that works beside the other one,
// found by asking the planner. Where no size does, it names a pair.
Placement plan_placement(const Layout& layout, const ModelSpec& model,
                         const Config::Placement& choices, const Budgets& budgets,
                         const PassNeeds& pass = {});

// What the device says of a unit whose gradients wait there, in bytes: the sum of squares of each
// leaf of what this rank owns, fp64, and whether an update has made a weight overflow, 32 bits.
std::uint64_t tally_bytes_of(const UnitPlace& unit);

// Gives every block that can have one its shadow.
void add_shadows(const Layout& layout, Placement& placement);
// Whether then every trained block would have one, and no gradient would wait elsewhere than in
// host memory: where every update can be tentative. What "auto" asks before it speculates.
bool shadows_serve_all(const Layout& layout, Placement placement);

// With a durable store, `count` copies of all of the state (durable_copies()).
// Requires: add_shadows(), where there are to be any, has been called.
void add_copies(const Layout& layout, std::uint32_t count, Placement& placement);
// How many `config` asks for. Two: the one that the last commit names, and the one that updates go
// to. An update that is tentative, while neither may be overwritten, takes a third.
std::uint32_t durable_copies(const Config& config, std::uint32_t ranks);
// Whether "auto" may speculate beside a durable store: where that takes no third copy.
bool may_speculate_by_itself(const Config& config, std::uint32_t ranks);
// What each unit needs in the device window: 0 for units that are on the device as a whole.
std::vector<std::uint64_t> window_unit_bytes(const Layout& layout, const Placement& placement);

}  // namespace sluice
