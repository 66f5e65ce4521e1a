// The part of a block store that only a durable store's commits need: where stores go, and the
// content of a commit's table.
#include <algorithm>

#include <sluice/error.h>
#include "engine/store/block_store.h"

namespace sluice {

std::optional<PlaneCopies> BlockStore::copies_of(const Tiers& tiers) {
  const std::span<const CommitPlane> planes = tiers.durable_planes();
  if (planes.empty()) return std::nullopt;
  std::vector<std::uint8_t> counts;
  for (const CommitPlane& plane : planes)
    counts.push_back(static_cast<std::uint8_t>(std::max(plane.copy_count, 1u)));
  return PlaneCopies(counts);
}

void BlockStore::save(Transfer& transfer, BlockId block, Plane plane, std::byte* source) {
  Entry& home = entry(block, plane);
  SLUICE_CHECK(copies_.has_value() && !home.storing, "a plane in memory is saved once per commit");
  home.storing = true;
  transfer.version = home.version;
  transfer.target = StoreTarget::kHome;
  start(transfer, block, plane, IoKind::kWrite, source);
}

bool BlockStore::may_store(BlockId block, Plane plane, StoreTarget target) const {
  if (!copies_) return true;
  const auto in_place =
      target == StoreTarget::kHome ? PlaneCopies::InPlace::kYes : PlaneCopies::InPlace::kNo;
  return copies_->target(planes_.index(block, plane), in_place).has_value();
}

// Requires: may_store().
std::uint8_t BlockStore::copy_to_write(std::uint32_t plane, StoreTarget target) const {
  if (!planes_.is_state(plane)) return 0;
  if (!copies_) return entries_[plane].copy ^ (target == StoreTarget::kHome ? 0 : 1);
  const auto in_place =
      target == StoreTarget::kHome ? PlaneCopies::InPlace::kYes : PlaneCopies::InPlace::kNo;
  const auto copy = copies_->target(plane, in_place);
  SLUICE_CHECK(copy.has_value(), "a store waits until a copy is free");
  return *copy;
}

void BlockStore::make_home(std::uint32_t plane, std::uint8_t copy) {
  if (copies_ && planes_.is_state(plane)) copies_->stored(plane, copy);
  entries_[plane].copy = copy;
}

std::uint64_t BlockStore::stored_version(BlockId block, Plane plane) const {
  const std::uint32_t index = planes_.index(block, plane);
  return integrity_.stored_as(sum_index(index, home_copy(index))).version;
}

std::vector<CommitPlane> BlockStore::committed_planes() const {
  std::vector<CommitPlane> planes;
  for (std::uint32_t plane = 0; plane < tiers_.durable_planes().size(); ++plane) {
    CommitPlane named = tiers_.durable_planes()[plane];
    if (named.length_bytes == 0) continue;
    const std::uint8_t copy =
        copies_->is_committing() ? copies_->named_by_next(plane) : copies_->named(plane);
    const Integrity::Stored stored = integrity_.stored_as(sum_index(plane, copy));
    SLUICE_CHECK(stored.sum.has_value(), "a commit names what has been stored");
    named.named_copy = copy;
    named.version = stored.version;
    named.checksum = *stored.sum;
    planes.push_back(named);
  }
  return planes;
}

void BlockStore::restore(std::span<const CommitPlane> planes) {
  auto from = planes.begin();
  for (std::uint32_t plane = 0; plane < tiers_.durable_planes().size(); ++plane) {
    if (tiers_.durable_planes()[plane].length_bytes == 0) continue;
    SLUICE_CHECK(from != planes.end(), "a commit has every plane");
    const auto copy = static_cast<std::uint8_t>(from->named_copy);
    copies_->restore(plane, copy);
    integrity_.stored(sum_index(plane, copy), from->version, from->checksum);
    entries_[plane].version = from->version;
    entries_[plane].copy = copy;
    ++from;
  }
}

}  // namespace sluice
