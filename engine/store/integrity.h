// The table describes the expected content of storage. The table has a checksum and a version for
// each stored plane. The table is kept in memory, so no drive can change it. Each plane's previous
// checksum is kept, too, so that messages can name the kind of damage. The files contain no block
// numbers. So only the table says which plane belongs to a place on storage.
//
// Damage means that the bytes of a read do not match the table. There are three kinds of damage.
// `stale`: a write was lost. The place has the bytes of the previous version, or has never been
// written.
// `misdirected`: a write went to the wrong place, so the bytes belong to another block.
// `damaged`: the bytes match no version of any block, because bits flipped or a write was torn.
// Blocks with equal bytes have equal checksums. If a drive exchanges two blocks with equal bytes,
// the table does not show this exchange. But the exchange changes no bytes.
//
// Thread rule: any thread may call wants(). The block store's thread calls everything else.
// Invariant: `current` is the checksum of the present bytes, and `previous` is the checksum of the
// former bytes. A checksum is empty if wants() returned false for the checksum's version.
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
  std::uint64_t version = 0;  // kStale, kMisdirected: version of the bytes that were found
};

class Integrity {
 public:
  // `plane_count` is the number of planes. The block store gives each plane its number.
  Integrity(Verify verify, std::size_t plane_count);

  // Returns whether the table keeps a checksum for the plane's version with the number `version`.
  // Depending on `verify`, the table keeps a checksum of every version, of one version in eight, or
  // of no version. If the table keeps one version in eight, an eighth of the planes have a checksum
  // for any given version number. Consecutive version numbers select different planes.
  bool wants(std::uint32_t plane, std::uint64_t version) const;

  // Enters `sum` into the table. `sum` is the checksum of the bytes that were written as version
  // `version`. `sum` is empty if wants() returned false.
  void stored(std::uint32_t plane, std::uint64_t version, std::optional<std::uint64_t> sum);

  struct Stored {
    std::uint64_t version = 0;
    std::optional<std::uint64_t> sum;  // empty: stored without a checksum, or never stored
  };
  Stored stored_as(std::uint32_t plane) const {
    return {.version = planes_[plane].version, .sum = planes_[plane].current};
  }

  // Compares `data`, the bytes that were read, with the table. `found` is the checksum of `data`.
  // Requires: stored() has been called for the plane's current version, with a checksum.
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
