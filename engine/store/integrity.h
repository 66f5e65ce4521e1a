// The expected content of every block on storage: a checksum and a version for each stored plane.
// The table is kept in memory, where no drive can change it. The previous checksum is kept, too, so
// that messages can name the kind of damage. The files hold only data, so a place in this table is
// the block's identity.
//
// A read that does not match the table is of one of three kinds.
// `stale`: a write was lost, so the bytes are those of the previous version, or were never written.
// `misdirected`: the bytes are those of another block, because a write went to the wrong place.
// `damaged`: the bytes are others, because of flipped bits or a torn write.
// Blocks with equal bytes have equal checksums. Confusing two such blocks raises no alarm and does
// no harm.
//
// Thread rule: any thread may call wants(). The block store's thread calls everything else.
// Invariant: the bytes of `current` have replaced other bytes. If the checksum of those other bytes
// was wanted, it is `previous`.
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
  // `plane_count` is two for each block. The block store numbers the planes.
  Integrity(Verify verify, std::size_t plane_count);

  // Whether `version` of `plane` carries a checksum. All versions carry a checksum, or no version
  // does, or one version in eight does. With one in eight, each version selects a different eighth
  // of the planes.
  bool wants(std::uint32_t plane, std::uint64_t version) const;

  // Takes note of the checksum of the bytes written as `version`. `sum` is empty if wants()
  // returned false.
  void stored(std::uint32_t plane, std::uint64_t version, std::optional<std::uint64_t> sum);

  struct Stored {
    std::uint64_t version = 0;
    std::optional<std::uint64_t> sum;  // none: stored without one, or never
  };
  Stored stored_as(std::uint32_t plane) const {
    return {.version = planes_[plane].version, .sum = planes_[plane].current};
  }

  // Compares bytes that were read with the table. `found` is the checksum of these bytes.
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
