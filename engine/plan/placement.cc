#include "engine/plan/placement.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/plan/sharding.h"

namespace sluice {

std::string_view name_of(Tier tier) {
  switch (tier) {
    case Tier::kDevice: return "device";
    case Tier::kHost: return "host";
    case Tier::kNvme: return "nvme";
  }
  return "unknown";
}

std::vector<Pool> Placement::pools() const {
  const auto slots = [](const SlotPool& pool) {
    return fmt::format("{} x {}", pool.count, format_bytes(pool.slot_bytes));
  };
  return {
      {Tier::kDevice, "resident parameters", resident_parameter_bytes,
       "units, or this rank's shards of them, whose home is device memory"},
      {Tier::kDevice, "parameter window", window_bytes, "units leased or read ahead"},
      {Tier::kDevice, "announced window", announced_window.size_bytes(),
       slots(announced_window) + ", announced units leased or read ahead"},
      {Tier::kDevice, "gradient slots", gradient_slots.size_bytes(),
       slots(gradient_slots) + ", one per unit in backward"},
      {Tier::kDevice, "gradient set", device_gradient_bytes,
       "gradients that wait here for their update"},
      {Tier::kDevice, "optimizer state", device_record_bytes, "units updated on the device"},
      {Tier::kDevice, "tallies", tally_bytes, "sums of squares of gradients that wait here"},
      {Tier::kDevice, "update staging", update_staging.size_bytes(),
       slots(update_staging) + ", blocks that come for their update and go again"},
      {Tier::kDevice, "ranks' buffers", rank_buffer_bytes,
       "votes, and gradients while groups or nodes add them"},
      {Tier::kDevice, "activation window", activation_window.size_bytes(),
       slots(activation_window) + ", between units: in use, read ahead, to come"},
      {Tier::kHost, "gradient set", gradient_set_bytes,
       "one reduced gradient for every parameter that waits here for its update"},
      {Tier::kHost, "gradient staging", gradient_staging.size_bytes(),
       slots(gradient_staging) + (gradients_leave() ? ", pieces on their way to their place"
                                                    : ", pieces to be added to the set")},
      {Tier::kHost, "parameters", host_parameter_bytes, "blocks whose home is host memory"},
      {Tier::kHost, "optimizer state", host_record_bytes, "blocks whose home is host memory"},
      {Tier::kHost, "tallies", tally_bytes, "those of the device, on arrival"},
      {Tier::kHost, "update flags", update_flag_bytes(),
       "whether updates on the device overflowed"},
      {Tier::kHost, "parameter slots", parameter_slots.size_bytes(),
       slots(parameter_slots) + ", between storage, device and update"},
      {Tier::kHost, "optimizer lanes", lanes.size_bytes(),
       slots(lanes) + ", records being read, updated, written"},
      {Tier::kHost, "lane gradients", lane_gradients.size_bytes(),
       slots(lane_gradients) + ", gradients that come for their update"},
      {Tier::kHost, "activations", host_activation_bytes,
       "between units, while they are not on the device"},
      {Tier::kHost, "activation staging", activation_staging.size_bytes(),
       slots(activation_staging) + ", activations between device and storage"},
      {Tier::kHost, "commit buffers", commit_buffers.size_bytes(),
       slots(commit_buffers) + ", state of the device on its way into a commit"},
      {Tier::kHost, "save buffers", save_buffers.size_bytes(),
       slots(save_buffers) + ", blocks on their way into a checkpoint beside training"},
      {Tier::kNvme, "parameters", nvme_parameter_bytes, "blocks whose home is storage"},
      {Tier::kNvme, "optimizer state", nvme_record_bytes, "blocks whose home is storage"},
      {Tier::kNvme, "gradient set", nvme_gradient_bytes,
       "spilled: each use in backward writes them, and the update reads them"},
      {Tier::kNvme, "activations", nvme_activation_bytes,
       "between units, while they are not on the device"},
      {Tier::kNvme, "shadow copies", shadow_bytes,
       "the same again, for updates before the norm is known"},
      {Tier::kNvme, "copies for commits", durable_bytes,
       fmt::format("{} of each block in all: a copy that a commit names is not overwritten",
                   durable_copies)},
  };
}

PassNeeds pass_needs(const Config& config, const Layout& layout, std::uint32_t ranks,
                     bool device_is_host) {
  return {
      .overlaps = config.optimizer.overlap != OverlapPolicy::kSerial,
      .lanes = config.optimizer.lanes,
      .fills_device = !device_is_host,
      .activations = config.activations,
      .rank_buffer_bytes = rank_buffer_bytes(config.sharding, ranks, layout),
      .is_durable = !config.storage.state.name.empty(),
      .is_unified = device_is_host && ranks == 1 && config.memory.unified != UnifiedMemory::kOff,
      .is_alone = ranks == 1,
      .streams_updates = config.optimizer.update_on == UpdateProcessor::kDevice,
      .save_buffers = config.memory.save_buffers};
}

SaveRoom save_room(const Layout& layout) {
  std::uint64_t elements = 0;
  for (const BlockPlace& block : layout.blocks())
    elements = std::max<std::uint64_t>(elements, block.element_count);
  const std::uint64_t piece_bytes =
      align_up(std::min(elements, kSavedPieceElements) * sizeof(float), kStorageAlignBytes);
  // With less, a drive reaches its rate only if more threads write.
  return {.write_bytes = std::min<std::uint64_t>(piece_bytes, 1_MiB),
          .decoded_bytes = layout.format().moments == OptimizerState::kFp32 ? 0 : piece_bytes};
}

std::uint64_t tally_bytes_of(const UnitPlace& unit) {
  const std::uint64_t leaves = unit.shard_elements / kAlignElements;
  return align_up(leaves * sizeof(double) + sizeof(std::uint32_t), kStorageAlignBytes);
}

UpdateSlot update_slot(const Layout& layout) {
  std::uint64_t elements = 0;
  for (const BlockPlace& block : layout.blocks())
    elements = std::max<std::uint64_t>(elements, block.element_count);
  const StateFormat& format = layout.format();
  const auto aligned = [](std::uint64_t bytes) { return align_up(bytes, kStorageAlignBytes); };
  UpdateSlot slot{.record_offset = aligned(elements * format.parameter_bytes())};
  slot.gradient_offset = slot.record_offset + aligned(format.record_bytes(elements));
  slot.flag_offset = slot.gradient_offset + aligned(elements * format.gradient_bytes());
  slot.size_bytes = slot.flag_offset + kStorageAlignBytes;
  return slot;
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

bool shadows_serve_all(const Layout& layout, Placement placement) {
  if (placement.gradients_leave()) return false;  // such blocks wait for the norm all the same
  add_shadows(layout, placement);
  return placement.shadow_bytes != 0 &&
         std::ranges::all_of(layout.blocks(), [&](const BlockPlace& block) {
           // Pinned units, and those that ranks keep gathered, are small.
           return layout.is_frozen(block.id) || layout.unit(block.unit).is_pinned ||
                  layout.keeps_gathered(block.unit) || placement.has_shadow(block.id);
         });
}

void add_copies(const Layout& layout, std::uint32_t count, Placement& placement) {
  std::uint64_t bytes = 0;
  placement.commit_bytes = 0;
  for (const BlockPlace& block : layout.blocks()) {
    const std::uint32_t i = index_of(block.id);
    const std::uint64_t copies = layout.is_frozen(block.id) ? 1 : count;
    if (!layout.is_frozen(block.id) && placement.parameter_tier[i] != Tier::kNvme)
      placement.commit_bytes += layout.parameter_slot_bytes(block.id);
    if (!layout.is_frozen(block.id) && placement.record_tier[i] != Tier::kNvme)
      placement.commit_bytes += layout.record_slot_bytes(block.id);
    bytes += copies * (layout.parameter_slot_bytes(block.id) + layout.record_slot_bytes(block.id));
  }
  placement.durable_copies = count;
  placement.durable_bytes =
      bytes - placement.nvme_parameter_bytes - placement.nvme_record_bytes - placement.shadow_bytes;
}

std::uint32_t durable_copies(const Config& config, std::uint32_t ranks) {
  if (config.storage.state.name.empty()) return 0;
  const bool takes_third = config.optimizer.overlap == OverlapPolicy::kSpeculative &&
                           (ranks > 1 || config.storage.state.commit_every > 1);
  return takes_third ? 3 : 2;
}

bool may_speculate_by_itself(const Config& config, std::uint32_t ranks) {
  return config.storage.state.name.empty() ||
         (ranks == 1 && config.storage.state.commit_every == 1);
}

std::vector<std::uint64_t> window_unit_bytes(const Layout& layout, const Placement& placement) {
  std::vector<std::uint64_t> bytes;
  for (const UnitPlace& unit : layout.units())
    bytes.push_back(placement.is_leased_at_home(unit) ? 0 : layout.unit_parameter_bytes(unit.id));
  return bytes;
}

}  // namespace sluice
