#include "engine/flow/waiting_gradients.h"

#include <utility>

namespace sluice {

WaitingGradients::WaitingGradients(const Layout& layout, const Placement& placement,
                                   Scheduler& scheduler)
    : layout_(layout),
      placement_(placement),
      scheduler_(scheduler),
      waits_(layout.blocks().size(), false),
      has_others_(layout.units().size(), false) {
  units_.reserve(layout.units().size());
}

void WaitingGradients::add(UnitId unit, bool keeps_others) {
  units_.push_back(unit);
  if (placement_.gradient_spills(unit)) return;  // its blocks come one by one
  for (const BlockPlace& block : layout_.blocks_of(unit)) wait_for(block.id);
  if (!keeps_others || has_others_[index_of(unit)]) return;
  has_others_[index_of(unit)] = true;
  scheduler_.pools().lend(pool_of(unit), others_bytes(unit));
}

void WaitingGradients::drop_others(UnitId unit) {
  if (!has_others_[index_of(unit)]) return;
  has_others_[index_of(unit)] = false;
  scheduler_.pools().take_back(pool_of(unit), others_bytes(unit));
}

void WaitingGradients::written(BlockId block) {
  wait_for(block);
}

void WaitingGradients::consumed(BlockId block) {
  if (!waits_[index_of(block)]) return;
  waits_[index_of(block)] = false;
  scheduler_.pools().take_back(pool_of(layout_.block(block).unit), bytes_of(block));
}

void WaitingGradients::drop_step() {
  for (const UnitId unit : std::exchange(units_, {})) {
    for (const BlockPlace& block : layout_.blocks_of(unit)) consumed(block.id);
    drop_others(unit);
  }
}

void WaitingGradients::wait_for(BlockId block) {
  if (waits_[index_of(block)]) return;
  waits_[index_of(block)] = true;
  scheduler_.pools().lend(pool_of(layout_.block(block).unit), bytes_of(block));
}

MemoryPool WaitingGradients::pool_of(UnitId unit) const {
  if (placement_.gradient_spills(unit)) return MemoryPool::kNvmeGradients;
  return placement_.gradient_is_on_device(unit) ? MemoryPool::kDeviceGradients
                                                : MemoryPool::kHostGradients;
}

std::uint64_t WaitingGradients::bytes_of(BlockId block) const {
  if (placement_.gradient_spills(layout_.block(block).unit))
    return layout_.gradient_slot_bytes(block);
  return layout_.block(block).element_count * layout_.format().gradient_bytes();
}

std::uint64_t WaitingGradients::others_bytes(UnitId unit) const {
  return (layout_.set_elements(unit) - layout_.unit(unit).shard_elements) *
         layout_.format().gradient_bytes();
}

}  // namespace sluice
