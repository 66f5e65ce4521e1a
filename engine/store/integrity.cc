#include "engine/store/integrity.h"

#include <algorithm>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr std::uint64_t kSampleEvery = 8;

}  // namespace

Integrity::Integrity(Verify verify, std::size_t plane_count)
    : verify_(verify), planes_(plane_count) {}

bool Integrity::wants(std::uint32_t plane, std::uint64_t version) const {
  switch (verify_) {
    case Verify::kFull: return true;
    case Verify::kSample: return (plane / 2 + plane % 2 * 3 + version) % kSampleEvery == 0;
    case Verify::kOff: break;
  }
  return false;
}

void Integrity::stored(std::uint32_t plane, std::uint64_t version,
                       std::optional<std::uint64_t> sum) {
  Sums& sums = planes_[plane];
  if (sums.is_written && sums.version != version) {
    sums.previous = sums.current;
    sums.previous_version = sums.version;
  }
  sums.current = sum;
  sums.version = version;
  sums.is_written = true;
}

std::optional<Damage> Integrity::find_damage(std::uint32_t plane, std::span<const std::byte> data,
                                             std::uint64_t found) const {
  const Sums& sums = planes_[plane];
  SLUICE_CHECK(sums.current.has_value(), "a block is written before it is read");
  if (found == *sums.current) return std::nullopt;
  Damage damage{.expected = *sums.current, .found = found};
  if (sums.previous == found) {
    damage.kind = DamageKind::kStale;
    damage.version = sums.previous_version;
    return damage;
  }
  for (std::uint32_t other = 0; other < planes_.size(); ++other) {
    const Sums& candidate = planes_[other];
    if (other == plane || (candidate.current != found && candidate.previous != found)) continue;
    damage.kind = DamageKind::kMisdirected;
    damage.owner = other;
    damage.version = candidate.current == found ? candidate.version : candidate.previous_version;
    return damage;
  }
  // The files are allocated and never written: zeros.
  if (std::ranges::all_of(data, [](std::byte byte) { return byte == std::byte{0}; }))
    damage.kind = DamageKind::kNeverWritten;
  return damage;
}

}  // namespace sluice
