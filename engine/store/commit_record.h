// A commit record as a C++ value, and the conversion of this value to bytes and back. The
// conversion from bytes also reports what is wrong with the bytes.
//
// Thread rule: the functions are pure.
// Invariant: decode_commit() can be called with any bytes, but accepts only bytes that
// encode_commit() can produce. In a whole record, the copies of planes lie inside the address range
// of their files, and do not overlap. Each plane names one of its own copies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/store/commit_format.h"

namespace sluice {

// The random identifier of a store.
using StoreId = std::array<std::uint8_t, 16>;
// Returns the id as 32 hexadecimal digits, for file names and messages.
std::string text_of(const StoreId& id);

// The loss scaler's state at the end of the step.
struct CommittedScale {
  double scale = 1;
  std::uint64_t good_steps = 0;
  std::uint32_t hysteresis_left = 0;
  bool operator==(const CommittedScale&) const = default;
};

struct CommitRecord {
  CommitKind kind = CommitKind::kState;
  StoreId store_id{};
  std::uint32_t rank = 0;
  std::uint32_t rank_count = 1;
  std::uint64_t generation = 0;
  std::uint64_t step = 0;
  std::uint64_t model_hash = 0;
  std::uint64_t layout_hash = 0;
  std::uint64_t config_hash = 0;
  CommittedScale scale = {};
  std::uint32_t file_count = 0;
  std::vector<CommitPlane> planes = {};
  std::string settings = {};
  std::vector<std::byte> application = {};
};

// commit_bytes() returns the length of the record in bytes. commit_slot_bytes() returns the length
// of a slot that can hold any record of `plane_count` planes. This length is rounded up to whole
// pages.
std::uint64_t commit_bytes(const CommitRecord& record);
std::uint64_t commit_slot_bytes(std::uint64_t plane_count);

// Writes the record to `target`, and fills the rest of the record's last page with zeros. Returns
// the number of bytes in all pages of the record. The caller writes these bytes to the slot.
// Requires: `target` has enough room, and `settings` and `application` are within their limits. A
// void record has neither settings nor application data.
std::uint64_t encode_commit(const CommitRecord& record, std::span<std::byte> target);

enum class CommitState : std::uint8_t {
  kEmpty,  // never written: zeros in place of the header
  kWhole,
  kDamaged,  // torn or altered; `problem` names the field, the expected and the found value
  kForeign,  // seems whole, but has another version of the format
};

struct CommitReading {
  CommitState state = CommitState::kEmpty;
  CommitRecord record = {};    // if the state is kWhole
  std::uint64_t checksum = 0;  // if the state is kWhole
  std::string problem = {};    // if the state is kDamaged or kForeign
};

CommitReading decode_commit(std::span<const std::byte> slot);

}  // namespace sluice
