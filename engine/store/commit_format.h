// The on-disk layout of a commit record (docs/storage-format.md). A record consists of a header of
// 256 bytes, the table of planes, the settings, and the application's blob. A record file has two
// slots of equal length. The records are written to the two slots alternately. A second file, the
// twin, holds the same records. All fields are little-endian and without padding.
//
// Thread rule: the functions are pure.
// Invariant: a record is whole if its checksum matches its bytes. The fields for magic, length and
// checksum have the same places in every version. The meaning of a field never changes without a
// new version, and no persisted value is renumbered.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace sluice {

inline constexpr std::uint64_t kCommitMagic = 0x0a31'544d'4355'4c53;  // "SLUCMT1\n"
inline constexpr std::uint32_t kCommitVersion = 1;
// The length of a slot and the length of the data in a slot are multiples of this number. O_DIRECT
// requires this alignment.
inline constexpr std::uint64_t kCommitAlignBytes = 4096;
inline constexpr std::uint32_t kCommitSlots = 2;
inline constexpr std::uint32_t kCommitTwins = 2;
inline constexpr std::uint32_t kCopiesMax = 3;
inline constexpr std::uint64_t kSettingsBytesMax = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kApplicationBytesMax = std::uint64_t{1} << 20;

// These values are persisted and must never be renumbered.
enum class CommitKind : std::uint32_t {
  kState = 1,  // the state of a step
  kVoid = 2,   // makes the former record of the slot void; has no planes
};

struct CommitHeader {
  std::uint64_t magic = kCommitMagic;
  std::uint32_t version = kCommitVersion;
  std::uint32_t kind = 0;          // CommitKind
  std::uint64_t length_bytes = 0;  // of the record, this header included
  std::uint64_t checksum = 0;      // XXH3 of the record; this field counts as 0
  std::uint8_t store_id[16] = {};  // random; also part of the names of the store's files
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 0;
  std::uint64_t generation = 0;  // grows by one with every record that this rank writes
  std::uint64_t step = 0;        // the record holds the state at the end of this step
  std::uint64_t model_hash = 0;
  std::uint64_t layout_hash = 0;
  std::uint64_t config_hash = 0;
  std::uint32_t file_count = 0;  // number of data files named in extents
  std::uint32_t plane_count = 0;
  std::uint32_t settings_bytes = 0;     // of JSON: optimizer, hyperparameters, kernels
  std::uint32_t application_bytes = 0;  // of the application's blob
  // The loss scaler's state at the end of the step.
  std::uint64_t loss_scale_bits = 0;  // of a double
  std::uint64_t good_steps = 0;
  std::uint32_t hysteresis_left = 0;
  std::uint32_t reserved = 0;
  std::uint8_t reserved_bytes[120] = {};
};
static_assert(sizeof(CommitHeader) == 256 && alignof(CommitHeader) == 8);
static_assert(offsetof(CommitHeader, length_bytes) == 16);
static_assert(offsetof(CommitHeader, checksum) == 24);
static_assert(offsetof(CommitHeader, store_id) == 32);
static_assert(offsetof(CommitHeader, generation) == 56);
static_assert(offsetof(CommitHeader, step) == 64);
static_assert(offsetof(CommitHeader, model_hash) == 72);
static_assert(offsetof(CommitHeader, file_count) == 96);
static_assert(offsetof(CommitHeader, application_bytes) == 108);
static_assert(offsetof(CommitHeader, loss_scale_bits) == 112);
static_assert(offsetof(CommitHeader, reserved_bytes) == 136);

// A copy's place in a data file.
struct CommitExtent {
  std::uint32_t file = 0;  // index of the file in the store, counted over all paths
  std::uint32_t reserved = 0;
  std::uint64_t offset_bytes = 0;  // a multiple of kCommitAlignBytes
};
static_assert(sizeof(CommitExtent) == 16);

// The entry for one plane of one block. The entry has the places of the plane's copies, and says
// which copy the record names.
struct CommitPlane {
  std::uint64_t length_bytes = 0;  // of each copy
  std::uint64_t version = 0;       // number of updates that the named copy has seen
  std::uint64_t checksum = 0;      // XXH3 of the named copy
  std::uint32_t copy_count = 0;    // 1..kCopiesMax
  std::uint32_t named_copy = 0;
  CommitExtent copies[kCopiesMax] = {};  // the entries from copy_count on are zero
};
static_assert(sizeof(CommitPlane) == 80);

static_assert(std::endian::native == std::endian::little);
static_assert(std::has_unique_object_representations_v<CommitHeader> &&
              std::has_unique_object_representations_v<CommitPlane>);

// The checksum of a record. The record consists of `header` and `rest`. The header's checksum field
// counts as zero.
std::uint64_t commit_checksum(CommitHeader header, std::span<const std::byte> rest);

}  // namespace sluice
