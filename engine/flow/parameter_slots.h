// Buffers in host memory for parameters whose home is storage or the device. Each buffer, called a
// slot, holds the parameters of one block. The prefetcher and the optimizer pass share the slots. A
// block has at most one slot. This slot holds the block's newest bytes. So if the prefetcher has
// read a block's bytes, the pass does not read them again. If the pass has read or computed a
// block's bytes, the prefetcher does not read them again. Parameters that have been fetched for a
// backward use stay in their slot until the update. Updated parameters stay in their slot until the
// next forward use.
//
// Thread rule: scheduler's thread only.
// Invariants: a slot is free, or bound to one block. A bound slot has users, or is kept for a later
// user. The pass can get one slot for each lane, but may have to wait until the copies under way
// have ended. The prefetcher can get all slots, except two kinds: the slots
// for lanes, and the kept slots.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/store/block_store.h"

namespace sluice {

enum class SlotUser : std::uint8_t { kPrefetch, kPass };

class ParameterSlots {
 public:
  // All arguments must outlive the slots. `on_change` runs on the scheduler's thread after every
  // transfer and whenever a slot becomes free.
  ParameterSlots(const Placement& placement, const Tiers& tiers, BlockStore& store,
                 Scheduler& scheduler, std::size_t block_count, std::function<void()> on_change);

  // The slot that is bound to `block`. The result is empty if there is no such slot.
  std::optional<std::uint32_t> find(BlockId block) const;
  // Binds a free slot to `block`, and adds `user` to the slot's users. The result is empty if no
  // slot is available now. Requires: `block` has no slot.
  std::optional<std::uint32_t> take(BlockId block, SlotUser user);
  // Adds a user to a bound slot.
  void join(std::uint32_t slot, SlotUser user);
  // Removes a user. When the last user leaves, the slot is freed or kept. The slot is kept if three
  // conditions hold: `keep` is set, the slot's bytes are valid, and fewer slots are kept than
  // permitted. A kept slot stays bound to its block.
  void leave(std::uint32_t slot, SlotUser user, bool keep);
  // Frees the kept slots that have no users.
  void drop_kept();

  // Starts to read `version` of the slot's block from storage, as part of step `step`.
  void fetch(std::uint32_t slot, std::uint64_t version, std::uint64_t step);
  // Starts to write the slot's bytes to `target` on storage. The bytes in the slot stay valid.
  // Requires: holds(slot, version).
  void store(std::uint32_t slot, std::uint64_t version, std::uint64_t step, StoreTarget target);
  bool is_in_pass(std::uint32_t slot) const { return slots_[slot].has_pass; }
  bool is_transferring(std::uint32_t slot) const { return slots_[slot].is_transferring; }
  // Whether the prefetcher is about to copy the slot's bytes to the device.
  bool is_being_copied(std::uint32_t slot) const { return slots_[slot].prefetch_users != 0; }

  // Whether the slot's bytes are the block's parameters at `version`.
  bool holds(std::uint32_t slot, std::uint64_t version) const {
    return slots_[slot].version == version;
  }
  // Whether the slot holds the parameters at `version`, either now or after the read that is under
  // way.
  bool will_hold(std::uint32_t slot, std::uint64_t version) const {
    return holds(slot, version) || slots_[slot].version_being_read == version;
  }
  // Called when the slot's bytes are about to change, or are no longer valid.
  void invalidate(std::uint32_t slot) { slots_[slot].version.reset(); }
  // Called when the slot's bytes are the parameters at `version`.
  void set_version(std::uint32_t slot, std::uint64_t version) { slots_[slot].version = version; }

  std::byte* data(std::uint32_t slot) const { return tiers_.parameter_slot(slot); }
  BlockId block(std::uint32_t slot) const { return slots_[slot].block; }

 private:
  static constexpr std::uint32_t kNoSlot = 0xffffffffu;

  struct Slot {
    Transfer transfer;
    BlockId block{};
    std::optional<std::uint64_t> version;  // empty: being filled, updated, or discarded
    std::optional<std::uint64_t> version_being_read;
    std::uint32_t prefetch_users = 0;
    bool has_pass = false;
    bool is_kept = false;
    bool is_bound = false;
    bool is_transferring = false;
  };

  void transferred(std::uint32_t slot);
  void free_if_unused(std::uint32_t slot);

  const Tiers& tiers_;
  BlockStore& store_;
  Scheduler& scheduler_;
  const std::uint64_t slot_bytes_;
  std::function<void()> on_change_;
  std::uint32_t pass_reserve_;  // slots that are reserved for the pass's lanes
  std::uint32_t kept_max_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;  // a heap; the lowest slot is first, so copies are adjacent
  std::vector<std::uint32_t> slot_of_block_;
  std::uint32_t kept_ = 0;
  std::uint32_t pass_users_ = 0;
};

}  // namespace sluice
