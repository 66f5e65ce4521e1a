// Reads the meaning of the record slots found in a store. The result is the newest commit, the
// repairs needed, and the slot of the next record. Another function finds the step that several
// ranks can continue from.
//
// A slot's twins are written one after the other. Each twin is flushed before the next one is
// written. So a power cut tears at most one twin. The slot's record is the newer one of its whole
// twins. If a written slot has no whole twin, something other than a power cut has damaged the
// slot. The record in the other slot cannot replace the damaged record, because the data that the
// other record names may have been overwritten since.
//
// Thread rule: pure.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/store/commit_record.h"

namespace sluice {

// The remedy for a damaged store, for messages.
inline constexpr std::string_view kStoreRemedy =
    "continue from a checkpoint: `sluice state remove`, then `sluice train --resume-from`";

// By slot and twin. Messages use `names`.
struct FoundCommits {
  std::array<std::array<CommitReading, kCommitTwins>, kCommitSlots> readings;
  std::array<std::string, kCommitTwins> names;
};

struct SlotTwin {
  std::uint32_t slot = 0;
  std::uint32_t twin = 0;
  bool operator==(const SlotTwin&) const = default;
};

struct CommitChoice {
  std::optional<std::uint32_t> newest;  // the slot of the newest commit
  std::optional<std::uint32_t> older;   // the slot of the commit before, if it is still there
  std::uint32_t next_slot = 0;          // for the next record
  std::uint64_t next_generation = 1;
  // Twins that do not hold their slot's record. Such twins are written again from the other twin,
  // before the first store.
  std::vector<SlotTwin> mends;
};

// The record that a slot holds. A slot's record is the newer one of those twins that are whole.
// Requires: choose_commit() has not failed.
const CommitReading* record_of_slot(const FoundCommits& found, std::uint32_t slot);

// Fails with:
// - kDamaged: a slot has lost both twins, or twins contradict each other.
// - kUnsupported: the format has another version.
// - kInput: the records are of different stores.
CommitChoice choose_commit(const FoundCommits& found);

// The steps that a rank can continue from.
struct CommitOffer {
  std::optional<std::uint64_t> newest;
  std::optional<std::uint64_t> older;
};

// The newest step that every rank can continue from. The result is empty if there is no such step.
std::optional<std::uint64_t> common_step(std::span<const CommitOffer> ranks);

}  // namespace sluice
