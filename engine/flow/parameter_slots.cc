#include "engine/flow/parameter_slots.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <sluice/error.h>

namespace sluice {

ParameterSlots::ParameterSlots(const Placement& placement, const Tiers& tiers, BlockStore& store,
                               Scheduler& scheduler, std::size_t block_count,
                               std::function<void()> on_change)
    : tiers_(tiers),
      store_(store),
      scheduler_(scheduler),
      slot_bytes_(placement.parameter_slots.slot_bytes),
      on_change_(std::move(on_change)),
      pass_reserve_(placement.lanes.count),
      kept_max_(placement.kept_slots),
      slots_(placement.parameter_slots.count),
      slot_of_block_(block_count, kNoSlot) {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    free_.push_back(slot);  // in ascending order, which is a heap
    slots_[slot].transfer.done = [this, slot] { transferred(slot); };
  }
}

std::optional<std::uint32_t> ParameterSlots::find(BlockId block) const {
  const std::uint32_t slot = slot_of_block_[index_of(block)];
  return slot == kNoSlot ? std::nullopt : std::optional(slot);
}

std::optional<std::uint32_t> ParameterSlots::take(BlockId block, SlotUser user) {
  SLUICE_CHECK(!find(block), "a block has at most one slot");
  const std::size_t reserved =
      user == SlotUser::kPass ? 0 : pass_reserve_ - std::min(pass_reserve_, pass_users_);
  if (free_.size() <= reserved) return std::nullopt;
  std::ranges::pop_heap(free_, std::greater());
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  scheduler_.pools().lend(MemoryPool::kParameterSlots, slot_bytes_);
  slot_of_block_[index_of(block)] = slot;
  slots_[slot].block = block;
  slots_[slot].is_bound = true;
  slots_[slot].version.reset();
  join(slot, user);
  return slot;
}

void ParameterSlots::join(std::uint32_t index, SlotUser user) {
  Slot& slot = slots_[index];
  if (std::exchange(slot.is_kept, false)) --kept_;
  if (user == SlotUser::kPrefetch) {
    ++slot.prefetch_users;
  } else {
    SLUICE_CHECK(!slot.has_pass, "a block is in one lane at a time");
    slot.has_pass = true;
    ++pass_users_;
  }
}

void ParameterSlots::leave(std::uint32_t index, SlotUser user, bool keep) {
  Slot& slot = slots_[index];
  if (user == SlotUser::kPrefetch) {
    --slot.prefetch_users;
  } else {
    slot.has_pass = false;
    --pass_users_;
  }
  const bool is_unused = slot.prefetch_users == 0 && !slot.has_pass;
  const bool pass_has_enough = free_.size() + pass_users_ >= pass_reserve_;
  if (is_unused && keep && slot.version && kept_ < kept_max_ && pass_has_enough) {
    slot.is_kept = true;
    ++kept_;
  }
  free_if_unused(index);
}

void ParameterSlots::drop_kept() {
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (!std::exchange(slots_[slot].is_kept, false)) continue;
    --kept_;
    free_if_unused(slot);
  }
}

void ParameterSlots::free_if_unused(std::uint32_t index) {
  Slot& slot = slots_[index];
  if (!slot.is_bound || slot.prefetch_users != 0 || slot.has_pass || slot.is_kept ||
      slot.is_transferring)
    return;
  slot.is_bound = false;
  slot_of_block_[index_of(slot.block)] = kNoSlot;
  free_.push_back(index);
  std::ranges::push_heap(free_, std::greater());
  scheduler_.pools().take_back(MemoryPool::kParameterSlots, slot_bytes_);
  on_change_();
}

void ParameterSlots::fetch(std::uint32_t index, std::uint64_t version, std::uint64_t step) {
  Slot& slot = slots_[index];
  slot.version.reset();
  slot.version_being_read = version;
  slot.is_transferring = true;
  slot.transfer.step = step;
  // Computation waits for prefetched parameters.
  slot.transfer.read_priority = slot.prefetch_users != 0 ? IoPriority::kHigh : IoPriority::kNormal;
  store_.fetch(slot.transfer, slot.block, Plane::kParameter, data(index), version);
}

void ParameterSlots::store(std::uint32_t index, std::uint64_t version, std::uint64_t step,
                           StoreTarget target) {
  Slot& slot = slots_[index];
  SLUICE_CHECK(slot.version == version, "what is stored is what the slot holds");
  slot.is_transferring = true;
  slot.transfer.step = step;
  store_.store(slot.transfer, slot.block, Plane::kParameter, data(index), version, target);
}

void ParameterSlots::transferred(std::uint32_t index) {
  Slot& slot = slots_[index];
  slot.is_transferring = false;
  if (slot.version_being_read) slot.version = std::exchange(slot.version_being_read, std::nullopt);
  free_if_unused(index);
  on_change_();
}

}  // namespace sluice
