#include "engine/flow/home_saver.h"

#include <algorithm>
#include <utility>

#include <sluice/error.h>

namespace sluice {
namespace {

// Blocks in transit at once: keeps a drive supplied beside the pass, without taking it over.
constexpr std::uint32_t kSaves = 4;
constexpr Plane kPlanes[] = {Plane::kParameter, Plane::kRecord};

}  // namespace

HomeSaver::HomeSaver(const FlowParts& parts, Hooks hooks)
    : layout_(parts.layout),
      placement_(parts.placement),
      tiers_(parts.tiers),
      store_(parts.store),
      device_(parts.device),
      scheduler_(parts.scheduler),
      hooks_(std::move(hooks)),
      is_saving_(parts.layout.blocks().size(), false),
      saves_(kSaves),
      stream_(parts.device, "commit") {
  for (const BlockPlace& block : parts.layout.blocks()) {
    const bool is_at_home =
        !parts.layout.is_frozen(block.id) && std::ranges::any_of(kPlanes, [&](Plane plane) {
          return tier(block.id, plane) != Tier::kNvme;
        });
    is_at_home_.push_back(is_at_home);
    block_count_ += is_at_home ? 1 : 0;
  }
  for (std::uint32_t save = 0; save < kSaves; ++save)
    saves_[save].parameters.done = saves_[save].record.done = [this, save] { ended(save); };
}

Tier HomeSaver::tier(BlockId block, Plane plane) const {
  return plane == Plane::kParameter ? placement_.parameter_tier[index_of(block)]
                                    : placement_.record_tier[index_of(block)];
}

bool HomeSaver::comes_from_device(BlockId block) const {
  return tier(block, Plane::kParameter) == Tier::kDevice ||
         tier(block, Plane::kRecord) == Tier::kDevice;
}

void HomeSaver::add(BlockId block) {
  SLUICE_CHECK(is_at_home(block) && !is_saving(block), "a block is saved once per commit");
  is_saving_[index_of(block)] = true;
  queues_[store_.version(block, Plane::kRecord)][comes_from_device(block) ? 1 : 0].push_back(block);
  ++waiting_;
  hooks_.on_change();
}

void HomeSaver::add_outdated() {
  for (const BlockPlace& block : layout_.blocks()) {
    if (!is_at_home(block.id) || is_saving(block.id)) continue;
    const bool is_outdated = std::ranges::any_of(kPlanes, [&](Plane plane) {
      return tier(block.id, plane) != Tier::kNvme &&
             store_.stored_version(block.id, plane) != store_.version(block.id, plane);
    });
    if (is_outdated) add(block.id);
  }
}

void HomeSaver::stop() {
  for (const auto& [version, queues] : queues_)
    for (const std::deque<BlockId>& queue : queues)
      for (const BlockId block : queue) is_saving_[index_of(block)] = false;
  queues_.clear();
  waiting_ = 0;
}

bool HomeSaver::may_start(BlockId block) const {
  return std::ranges::all_of(kPlanes, [&](Plane plane) {
    return tier(block, plane) == Tier::kNvme ||
           (hooks_.may_store(store_.version(block, plane)) &&
            store_.may_store(block, plane, StoreTarget::kHome));
  });
}

// A block of a later version waits for the table of the commit under way, which may need a block of
// an earlier version that comes after it. Blocks of one version wait for the same commit, so the
// first of them stands for all: there may be tens of thousands.
std::optional<BlockId> HomeSaver::take_next(bool has_buffer) {
  for (auto of_version = queues_.begin(); of_version != queues_.end(); ++of_version) {
    auto& [in_host, on_device] = of_version->second;
    for (std::deque<BlockId>* const queue : {&in_host, &on_device}) {
      if (queue->empty() || (queue == &on_device && !has_buffer) || !may_start(queue->front()))
        continue;
      const BlockId block = queue->front();
      queue->pop_front();
      --waiting_;
      if (in_host.empty() && on_device.empty()) queues_.erase(of_version);
      return block;
    }
  }
  return std::nullopt;
}

void HomeSaver::pump() {
  if (scheduler_.failed()) return stop();
  for (std::uint32_t save = 0; save < kSaves && waiting_ != 0; ++save) {
    if (saves_[save].is_busy) continue;
    if (const auto block = take_next(save < placement_.commit_buffers.count)) start(save, *block);
  }
}

std::byte* HomeSaver::buffer_of(std::uint32_t save, Plane plane) const {
  std::byte* buffer = tiers_.commit_buffer(save);
  return plane == Plane::kParameter ? buffer : buffer + placement_.parameter_slots.slot_bytes;
}

void HomeSaver::start(std::uint32_t index, BlockId block) {
  Save& save = saves_[index];
  save.block = block;
  save.is_busy = true;
  ++under_way_;
  const auto is_in_memory = [&](Plane plane) { return tier(block, plane) != Tier::kNvme; };
  save.pending = static_cast<std::uint32_t>(std::ranges::count_if(kPlanes, is_in_memory));
  const BlockPlace& place = layout_.block(block);
  for (const Plane plane : kPlanes) {
    if (!is_in_memory(plane)) continue;
    const bool is_parameter = plane == Plane::kParameter;
    if (tier(block, plane) == Tier::kHost) {
      write(index, plane, is_parameter ? tiers_.host_parameters(block) : tiers_.host_record(block));
      continue;
    }
    std::byte* const buffer = buffer_of(index, plane);
    device_.copy(
        buffer, is_parameter ? tiers_.device_parameters(place) : tiers_.device_record(block),
        is_parameter ? layout_.parameter_bytes(block) : layout_.record_bytes(block), stream_.id());
    device_.notify(stream_.id(), [this, index, plane] {
      scheduler_.post([this, index, plane] { write(index, plane, buffer_of(index, plane)); });
    });
  }
}

void HomeSaver::write(std::uint32_t index, Plane plane, std::byte* source) {
  Save& save = saves_[index];
  if (scheduler_.failed()) return ended(index);
  store_.save(plane == Plane::kParameter ? save.parameters : save.record, save.block, plane,
              source);
}

void HomeSaver::ended(std::uint32_t index) {
  Save& save = saves_[index];
  if (--save.pending != 0) return;
  save.is_busy = false;
  --under_way_;
  is_saving_[index_of(save.block)] = false;
  if (!scheduler_.failed()) hooks_.saved(store_.version(save.block, Plane::kRecord));
  hooks_.on_change();
}

}  // namespace sluice
