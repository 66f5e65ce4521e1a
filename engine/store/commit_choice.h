// The functions interpret the record slots that were found in a store. choose_commit() finds the
// newest commit, the necessary repairs, and the slot for the next record. common_step() finds the
// step from which several ranks can continue.
//
// A slot's two twins are written one after the other. The first twin is flushed before the second
// one is written. So a power cut damages at most one twin. The record of a slot is the undamaged
// twin. If both twins are undamaged, the record is the newer twin. If a slot was written and both
// of its twins are damaged, the cause is not a power cut. The record in the other slot cannot
// replace the damaged record. The record in the other slot names older data, and the older data may
// have been overwritten.
//
// Thread rule: the functions are pure.
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

// The remedy that is named in messages about a damaged store.
inline constexpr std::string_view kStoreRemedy =
    "continue from a checkpoint: `sluice state remove`, then `sluice train --resume-from`";

// The records that were found in each slot and twin. `names` holds the twins' file names, for
// messages.
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
  std::optional<std::uint32_t> older;   // the slot of the previous commit, if it still exists
  std::uint32_t next_slot = 0;          // for the next record
  std::uint64_t next_generation = 1;
  // The twins that do not hold their slot's record. Before anything is stored, each of these twins
  // is written again from the other twin of its slot.
  std::vector<SlotTwin> mends;
};

// Returns the record of `slot`. The record is the undamaged twin of this slot. If both twins are
// undamaged, the record is the newer twin.
// Requires: choose_commit() has not failed.
const CommitReading* record_of_slot(const FoundCommits& found, std::uint32_t slot);

// Fails with:
// - kDamaged: a slot has lost both twins, or twins contradict each other.
// - kUnsupported: a record has another version of the format.
// - kInput: the records are of different stores.
CommitChoice choose_commit(const FoundCommits& found);

// The steps from which a rank can continue.
struct CommitOffer {
  std::optional<std::uint64_t> newest;
  std::optional<std::uint64_t> older;
};

// The step of the newest commit that every rank has. The result is empty if there is no such
// commit. A rank may still have a commit that a restored state of a lower step has replaced. Such a
// commit counts only while a rank has no commit of the restored state.
// Requires: the ranks are at most one commit apart, and two successive commits differ in step.
std::optional<std::uint64_t> common_step(std::span<const CommitOffer> ranks);

}  // namespace sluice
