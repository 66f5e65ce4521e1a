// The expected content of every block on storage: a checksum for each stored plane of each block,
// with its version, in memory where no drive can touch it. The previous one is kept too, so that
// damage can be named. The files hold only data: a place in this table is the block's identity.
//
// A read that does not match is one of these:
//   stale        its bytes are those of the version before (or were never written): a lost write
//   misdirected  its bytes are those of another block: a write that went to the wrong place
//   damaged      neither: flipped bits, a torn write
// Blocks with equal bytes have equal checksums: confusing them raises no alarm and does no harm.
//
// Thread rule: wants() from any thread; the rest from the block store's writer.
// Invariant: `previous` is the checksum of the bytes that `current` replaced, if that was wanted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <sluice/config.h>

namespace sluice {

enum class DamageKind : std::uint8_t { kFlipped, kStale, kNeverWritten, kMisdirected };

struct Damage {
  DamageKind kind = DamageKind::kFlipped;
  std::uint64_t expected = 0;  // checksums
  std::uint64_t found = 0;
  std::uint32_t owner = 0;    // kMisdirected: the plane whose bytes were found
  std::uint64_t version = 0;  // kStale, kMisdirected: of the bytes that were found
};

class Integrity {
 public:
  // `plane_count`: two for each block, numbered by the block store.
  Integrity(Verify verify, std::size_t plane_count);

  // Whether `version` of `plane` carries a checksum: all versions, none, or one in eight, and at
  // each version a different eighth of the planes.
  bool wants(std::uint32_t plane, std::uint64_t version) const;

  // Notes the bytes written as `version`. No checksum: wants() returned false.
  void stored(std::uint32_t plane, std::uint64_t version, std::optional<std::uint64_t> sum);

  struct Stored {
    std::uint64_t version = 0;
    std::optional<std::uint64_t> sum;  // none: stored without one, or never
  };
  Stored stored_as(std::uint32_t plane) const {
    return {.version = planes_[plane].version, .sum = planes_[plane].current};
  }

  // Compares the bytes read as `version`, and their checksum, with those that were stored.
  // Requires: wants(plane, version), and stored() has been called for that version.
  std::optional<Damage> find_damage(std::uint32_t plane, std::span<const std::byte> data,
                                    std::uint64_t found) const;

 private:
  struct Sums {
    std::optional<std::uint64_t> current;
    std::optional<std::uint64_t> previous;
    std::uint64_t version = 0;
    std::uint64_t previous_version = 0;
    bool is_written = false;
  };

  Verify verify_;  // constant after construction
  std::vector<Sums> planes_;
};

}  // namespace sluice
