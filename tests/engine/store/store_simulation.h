// The simulation runs trainings on drives whose power fails. The trainings do no arithmetic. One or
// several ranks run the library's code for copies, commits and the opening of stores. PowerCutDisk
// is the drive of each rank. If an order is not fixed, the seed decides the order. After each cut,
// the ranks open their stores again, and must find the complete state of one step. This step must
// not be older than the last step whose commit was durable on all ranks. The power can also fail
// while the ranks open their stores.
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
  kOwnCommitSuffices,  // copies of a commit are free after this rank's next commit
  kStoreInPlace,       // stores go to the home
  kCommitTooEarly,     // a commit begins before the last store has ended
  kNewestOverwritten,  // a record overwrites the newest record
  kGenerationStays,    // the generation number in the records does not grow
  kVoidLeftOut,        // a rank that goes back does not void its newer record
  kMendLeftOut,        // twins are not repaired after a cut
};

struct SimulationOptions {
  std::uint64_t seed = 1;
  std::uint32_t ranks = 1;
  std::uint32_t planes = 4;
  std::uint32_t planes_in_memory = 0;  // the number of planes that are stored only for commits
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
  std::string failure;          // empty if nothing was lost
};

// Runs until `options.cuts` power cuts have happened, or until the first failure.
SimulationResult simulate_store(const SimulationOptions& options);

}  // namespace sluice::test
