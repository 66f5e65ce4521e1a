// The function tries every possible order of the events in a small training. The ranks, blocks,
// lanes, stores, commits and votes form a state machine. The state machine uses the library's
// PlaneCopies. In each reachable state, a power cut must leave a step that every rank can open. Any
// part of the unflushed data may survive the cut, and such a step must exist in every case. Every
// state except the last must have a next state.
//
// A block has three events: the block takes a lane, the block's store begins, and the store ends.
// The store can begin only when a copy is free. A commit has three events: the commit begins, its
// data is flushed, and its record becomes durable. In one more event, all ranks vote. A cut during
// a store or a flush may leave any part of the data. A cut during the write of a record leaves the
// old or the new record in the slot.
//
// Thread rule: any thread may call the function, because the function is pure.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::test {

// The time at which a block may be updated in step v.
// - kDeferred: the block may be updated after the ranks have voted on step v.
// - kEager: the block may be updated before the vote.
// - kSpeculative: the block may be updated before the vote, but only in a copy that is not the
//   block's home. If the vote rejects the update, the block is updated again after the vote.
enum class SmallPolicy : std::uint8_t { kDeferred, kEager, kSpeculative };

struct SmallProtocol {
  std::uint32_t ranks = 2;
  std::uint32_t blocks = 2;
  std::uint32_t lanes = 1;
  std::uint8_t copies = 2;
  std::uint32_t steps = 4;
  std::uint32_t commit_every = 1;
  SmallPolicy policy = SmallPolicy::kDeferred;
  // If this is not 0, the store has a commit of this step, and a state of step 0 has just been
  // restored over it. The first commit is the commit of the restored state.
  std::uint32_t restored_over = 0;
  // Deliberate errors in the protocol.
  bool votes_without_commit = false;  // a rank votes before its own commit is durable
  bool frees_without_vote = false;    // copies are free when this rank's commit is durable
  bool skips_flush = false;           // the data is not flushed
};

struct SmallOutcome {
  std::uint64_t states = 0;
  bool ended = false;      // the last step is reachable
  std::string deadlock;    // a state without a next state; empty = none
  std::string unopenable;  // a state in which a power cut loses everything; empty = none
};

SmallOutcome explore(const SmallProtocol& protocol);

}  // namespace sluice::test
