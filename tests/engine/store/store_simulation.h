// Simulates trainings without arithmetic on drives whose power fails. The product's code for
// copies, commits and opening runs over PowerCutDisk, with one or several ranks. The seed decides
// all orders that are not fixed. After each cut, the store has to open with every byte of a step.
// The step after the opening must not be older than the last step whose commit counted on all
// ranks. Cuts also happen during the opening.
//
// Each mutation puts one error into the protocol. With the mutations, tests show that the
// simulation finds such errors.
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
  kTwinsAtOnce,       // both twins are written, then both are flushed
  kTwinsNotFlushed,
  kFreedTooEarly,      // copies of a commit are free when the next commit begins
  kOwnCommitSuffices,  // these copies are free once this rank alone has the next commit
  kStoreInPlace,       // stores go to the home
  kCommitTooEarly,     // a commit begins before the last store has ended
  kNewestOverwritten,  // a record overwrites the newest record
  kGenerationStays,    // records do not count generations
  kVoidLeftOut,        // a rank that goes back does not void its newer record
  kMendLeftOut,        // twins are not repaired after a cut
};

struct SimulationOptions {
  std::uint64_t seed = 1;
  std::uint32_t ranks = 1;
  std::uint32_t planes = 4;
  std::uint32_t planes_in_memory = 0;  // this many planes are stored only for commits
  std::uint8_t copies = 2;
  std::uint64_t commit_every = 1;
  bool is_eager = false;  // updates are stored before their step's vote
  std::uint32_t cuts = 8;
  Mutation mutation = Mutation::kNone;
};

struct SimulationResult {
  std::uint64_t cuts = 0;
  std::uint64_t cuts_in_recovery = 0;
  std::uint64_t steps = 0;
  std::uint64_t went_back = 0;  // ranks that made a record void
  std::string failure;          // empty if nothing was lost
};

// Runs until `options.cuts` power cuts have happened, or until the first failure.
SimulationResult simulate_store(const SimulationOptions& options);

}  // namespace sluice::test
