// Every order in which a small training can go: its ranks, blocks, lane, stores, commits and votes
// as a state machine over the product's PlaneCopies, searched exhaustively. In each state that can
// be reached, a power cut must leave a step that every rank can open, whatever it keeps of what has
// not been flushed; and none but the last may be without a way on.
//
// Events: a block takes a lane, its store begins once there is a copy for it, the store ends; a
// commit begins, its data is flushed, its record is durable; all ranks vote. While a store or a
// flush is under way, a cut may leave anything of it; while a record is written, the one before in
// its slot or the new one.
//
// Thread rule: pure.
#pragma once

#include <cstdint>
#include <string>

namespace sluice::test {

// When a block of step v may be updated: kDeferred after the vote of v; kEager before; kSpeculative
// before, to a copy that is not the home, and again after the vote where that went against it.
enum class SmallPolicy : std::uint8_t { kDeferred, kEager, kSpeculative };

struct SmallProtocol {
  std::uint32_t ranks = 2;
  std::uint32_t blocks = 2;
  std::uint32_t lanes = 1;
  std::uint8_t copies = 2;
  std::uint32_t steps = 4;
  std::uint32_t commit_every = 1;
  SmallPolicy policy = SmallPolicy::kDeferred;
  // Wrong on purpose.
  bool votes_without_commit = false;  // a rank votes before its own commit is durable
  bool frees_without_vote = false;    // copies are free when this rank's commit is durable
  bool skips_flush = false;           // of the data
};

struct SmallOutcome {
  std::uint64_t states = 0;
  bool ended = false;      // the last step can be reached
  std::string deadlock;    // a state without a way on; empty: there is none
  std::string unopenable;  // a state in which a power cut loses everything
};

SmallOutcome explore(const SmallProtocol& protocol);

}  // namespace sluice::test
