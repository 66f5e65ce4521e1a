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

void HomeSaver::add(BlockId block, std::uint64_t step) {
  SLUICE_CHECK(is_at_home(block) && !is_saving(block), "a block is saved once per commit");
  is_saving_[index_of(block)] = true;
  queues_[step][comes_from_device(block) ? 1 : 0].push_back(block);
  ++waiting_;
  hooks_.on_change();
}

bool HomeSaver::is_outdated(BlockId block) const {
  return std::ranges::any_of(kPlanes, [&](Plane plane) {
    return tier(block, plane) != Tier::kNvme &&
           store_.stored_version(block, plane) != store_.version(block, plane);
  });
}

void HomeSaver::add_outdated(std::uint64_t step) {
  for (const BlockPlace& block : layout_.blocks()) {
    if (is_at_home(block.id) && !is_saving(block.id) && is_outdated(block.id)) add(block.id, step);
  }
}

void HomeSaver::stop() {
  for (const auto& [step, queues] : queues_)
    for (const std::deque<BlockId>& queue : queues)
      for (const BlockId block : queue) is_saving_[index_of(block)] = false;
  queues_.clear();
  waiting_ = 0;
}

bool HomeSaver::may_start(const Wanted& wanted) const {
  if (!hooks_.may_store(wanted.step)) return false;
  return std::ranges::all_of(kPlanes, [&](Plane plane) {
    return tier(wanted.block, plane) == Tier::kNvme ||
           store_.may_store(wanted.block, plane, StoreTarget::kHome);
  });
}

// A block of a later step waits for the table of the commit under way, which may need a block of an
// earlier step that comes after it. Blocks of one step wait for the same commit, so the first of
// them stands for all: there may be tens of thousands.
std::optional<HomeSaver::Wanted> HomeSaver::take_next(bool has_buffer) {
  for (auto of_step = queues_.begin(); of_step != queues_.end(); ++of_step) {
    auto& [in_host, on_device] = of_step->second;
    for (std::deque<BlockId>* const queue : {&in_host, &on_device}) {
      if (queue->empty() || (queue == &on_device && !has_buffer)) continue;
      const Wanted wanted{.block = queue->front(), .step = of_step->first};
      if (!may_start(wanted)) continue;
      queue->pop_front();
      --waiting_;
      if (in_host.empty() && on_device.empty()) queues_.erase(of_step);
      return wanted;
    }
  }
  return std::nullopt;
}

void HomeSaver::pump() {
  if (scheduler_.failed()) return stop();
  for (std::uint32_t save = 0; save < kSaves && waiting_ != 0; ++save) {
    if (saves_[save].is_busy) continue;
    if (const auto wanted = take_next(save < placement_.commit_buffers.count)) start(save, *wanted);
  }
}

std::byte* HomeSaver::buffer_of(std::uint32_t save, Plane plane) const {
  std::byte* buffer = tiers_.commit_buffer(save);
  return plane == Plane::kParameter ? buffer : buffer + placement_.parameter_slots.slot_bytes;
}

void HomeSaver::start(std::uint32_t index, const Wanted& wanted) {
  const BlockId block = wanted.block;
  Save& save = saves_[index];
  save.block = block;
  save.step = wanted.step;
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
  Transfer& transfer = plane == Plane::kParameter ? save.parameters : save.record;
  transfer.step = save.step;
  store_.save(transfer, save.block, plane, source);
}

void HomeSaver::ended(std::uint32_t index) {
  Save& save = saves_[index];
  if (--save.pending != 0) return;
  save.is_busy = false;
  --under_way_;
  is_saving_[index_of(save.block)] = false;
  if (!scheduler_.failed()) hooks_.saved(save.step);
  hooks_.on_change();
}

}  // namespace sluice
