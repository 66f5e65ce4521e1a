// Trainings without arithmetic on drives whose power fails: the product's own code of copies,
// commits and opening over PowerCutDisk, with one or several ranks, and everything that may happen
// in any order drawn by seed. After each cut the store has to open, at a step that counted or a
// later one, with every byte of it; cuts come during that, too.
//
// Mutations put one wrong step each into the protocol, so that tests see that they would be found.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace sluice::test {

enum class Mutation : std::uint8_t {
  kNone,
  kDataNotFlushed,
  kRecordBeforeData,  // the data is flushed after the record
  kTwinsAtOnce,       // both written, then both flushed
  kTwinsNotFlushed,
  kFreedTooEarly,      // copies that the commit before names are free when the next one begins
  kOwnCommitSuffices,  // of several ranks: they are free when this rank has the next one
  kStoreInPlace,       // stores go to the home
  kCommitTooEarly,     // begun before the last store has ended
  kNewestOverwritten,  // records go to the slot of the newest
  kGenerationStays,    // records do not count up
  kVoidLeftOut,        // a rank goes back without taking its newer record back
  kMendLeftOut,        // twins stay as a cut has left them
};

struct SimulationOptions {
  std::uint64_t seed = 1;
  std::uint32_t ranks = 1;
  std::uint32_t planes = 4;
  std::uint32_t planes_in_memory = 0;  // of them: stored for commits alone
  std::uint8_t copies = 2;
  std::uint64_t commit_every = 1;
  bool is_eager = false;  // updates are stored before the vote of their step
  std::uint32_t cuts = 8;
  Mutation mutation = Mutation::kNone;
};

struct SimulationResult {
  std::uint64_t cuts = 0;
  std::uint64_t cuts_in_recovery = 0;
  std::uint64_t steps = 0;
  std::uint64_t went_back = 0;  // ranks that made a record void
  std::string failure;          // empty: nothing was lost
};

// Runs until so many cuts have come, or the first failure.
SimulationResult simulate_store(const SimulationOptions& options);

}  // namespace sluice::test
