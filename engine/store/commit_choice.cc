#include "engine/store/commit_choice.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

std::string place_of(const FoundCommits& found, std::uint32_t slot, std::uint32_t twin) {
  return fmt::format("commit record {} in {}", slot, found.names[twin]);
}

void check_slot(const FoundCommits& found, std::uint32_t slot) {
  const auto& [first, second] = found.readings[slot];
  for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin) {
    const CommitReading& reading = found.readings[slot][twin];
    if (reading.state == CommitState::kForeign)
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("{} cannot be read: {}; use the program that wrote it, or move the state "
                      "with its `sluice state export`",
                      place_of(found, slot, twin), reading.problem));
  }
  if (first.state == CommitState::kDamaged && second.state == CommitState::kDamaged)
    throw Error(ErrorCode::kDamaged,
                fmt::format("{} is damaged ({}), and so is its twin in {} ({}): the content of "
                            "the store is unknown; {}",
                            place_of(found, slot, 0), first.problem, found.names[1], second.problem,
                            kStoreRemedy));
  if (first.state == CommitState::kWhole && second.state == CommitState::kWhole &&
      first.record.generation == second.record.generation && first.checksum != second.checksum)
    throw Error(ErrorCode::kDamaged,
                fmt::format("{} and its twin in {} are both of generation {} and differ; {}",
                            place_of(found, slot, 0), found.names[1], first.record.generation,
                            kStoreRemedy));
}

// All whole records are of one store and rank.
void check_same_store(const FoundCommits& found) {
  const CommitRecord* first = nullptr;
  for (std::uint32_t slot = 0; slot < kCommitSlots; ++slot) {
    for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin) {
      const CommitReading& reading = found.readings[slot][twin];
      if (reading.state != CommitState::kWhole) continue;
      const CommitRecord& record = reading.record;
      if (first == nullptr) first = &record;
      if (record.store_id == first->store_id && record.rank == first->rank &&
          record.rank_count == first->rank_count)
        continue;
      throw Error(
          ErrorCode::kInput,
          fmt::format("{} is of store {}, rank {} of {}, and others here of store {}, "
                      "rank {} of {}; bring the files of one store together",
                      place_of(found, slot, twin), text_of(record.store_id), record.rank,
                      record.rank_count, text_of(first->store_id), first->rank, first->rank_count));
    }
  }
}

}  // namespace

const CommitReading* record_of_slot(const FoundCommits& found, std::uint32_t slot) {
  const CommitReading* newer = nullptr;
  for (const CommitReading& twin : found.readings[slot]) {
    if (twin.state != CommitState::kWhole) continue;
    if (newer == nullptr || twin.record.generation > newer->record.generation) newer = &twin;
  }
  return newer;
}

CommitChoice choose_commit(const FoundCommits& found) {
  CommitChoice choice;
  check_same_store(found);
  std::array<std::optional<std::uint64_t>, kCommitSlots> commits;  // generations
  for (std::uint32_t slot = 0; slot < kCommitSlots; ++slot) {
    check_slot(found, slot);
    const CommitReading* reading = record_of_slot(found, slot);
    if (reading == nullptr) continue;
    const std::uint64_t generation = reading->record.generation;
    choice.next_generation = std::max(choice.next_generation, generation + 1);
    if (reading->record.kind == CommitKind::kState) commits[slot] = generation;
    for (std::uint32_t twin = 0; twin < kCommitTwins; ++twin) {
      const CommitReading& other = found.readings[slot][twin];
      if (other.state != CommitState::kWhole || other.checksum != reading->checksum)
        choice.mends.push_back({slot, twin});
    }
  }
  if (commits[0] && commits[1] && *commits[0] == *commits[1])
    throw Error(ErrorCode::kDamaged,
                fmt::format("both commit records in {} are of generation {}; {}", found.names[0],
                            *commits[0], kStoreRemedy));
  if (commits[0] || commits[1]) choice.newest = commits[1] > commits[0] ? 1 : 0;
  if (commits[0] && commits[1]) choice.older = 1 - *choice.newest;
  if (choice.newest) choice.next_slot = 1 - *choice.newest;
  return choice;
}

std::optional<std::uint64_t> common_step(std::span<const CommitOffer> ranks) {
  const auto has = [](const CommitOffer& rank, std::uint64_t step) {
    return rank.newest == step || rank.older == step;
  };
  if (ranks.empty()) return std::nullopt;
  const auto& [newest, older] = ranks[0];
  // No two commits that follow each other are of one step (DurableStore::require_other_step()). So
  // ranks whose newest commits are of one step have the same newest commit.
  if (newest && std::ranges::all_of(ranks, [&](const auto& rank) { return rank.newest == newest; }))
    return newest;
  // Some ranks are one commit ahead, and what they have before it is what the others have. Two
  // steps are common only after a restored state has gone back: one rank has 100 and, before it,
  // the restored 95, and another has 95 and, before it, the 100 that the restored state replaced.
  // Copies of the replaced 100 may be overwritten. It is the higher one of the two.
  std::optional<std::uint64_t> common;
  for (const auto& step : {newest, older}) {
    if (step && std::ranges::all_of(ranks, [&](const auto& rank) { return has(rank, *step); }))
      common = std::min(common.value_or(*step), *step);
  }
  return common;
}

}  // namespace sluice
