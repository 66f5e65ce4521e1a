#include "tests/engine/store/small_protocol.h"

#include <gtest/gtest.h>

#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

// Two ranks, two blocks, four steps: every order, each policy.
TEST(SmallProtocol, HasNoDeadlockAndAlwaysOpens) {
  const bool is_slow = campaign(1).cases > 1;  // a million states
  for (const auto policy :
       {SmallPolicy::kDeferred, SmallPolicy::kEager, SmallPolicy::kSpeculative}) {
    for (const std::uint8_t copies : {std::uint8_t{2}, std::uint8_t{3}}) {
      for (const std::uint32_t every : {1u, 2u}) {
        for (const std::uint32_t ranks : {1u, 2u}) {
          SCOPED_TRACE(testing::Message()
                       << "policy " << static_cast<int>(policy) << ", " << int{copies}
                       << " copies, every " << every << ", " << ranks << " ranks");
          const bool is_large = copies == 3 && ranks == 2 && every == 1;
          const SmallOutcome outcome = explore({.ranks = ranks,
                                                .copies = copies,
                                                .steps = is_large && !is_slow ? 2u : 4u,
                                                .commit_every = every,
                                                .policy = policy});
          EXPECT_EQ(outcome.deadlock, "");
          EXPECT_EQ(outcome.unopenable, "");
          EXPECT_TRUE(outcome.ended);
          EXPECT_GT(outcome.states, 50u);
        }
      }
    }
  }
}

// A state of step 0 is restored over the only commit of a store, and trains up to that commit's
// step and beyond it.
TEST(SmallProtocol, RestoredStatesAreNeverMixedWithWhatTheyReplaced) {
  const bool is_slow = campaign(1).cases > 1;
  for (const auto policy :
       {SmallPolicy::kDeferred, SmallPolicy::kEager, SmallPolicy::kSpeculative}) {
    for (const std::uint8_t copies : {std::uint8_t{2}, std::uint8_t{3}}) {
      for (const std::uint32_t every : {1u, 2u}) {
        for (const std::uint32_t over : {1u, 2u, 3u}) {
          SCOPED_TRACE(testing::Message()
                       << "policy " << static_cast<int>(policy) << ", " << int{copies}
                       << " copies, every " << every << ", over " << over);
          const SmallOutcome outcome = explore({.blocks = every,
                                                .copies = copies,
                                                .steps = is_slow ? 4u : 3u,
                                                .commit_every = every,
                                                .policy = policy,
                                                .restored_over = over});
          EXPECT_EQ(outcome.deadlock, "");
          EXPECT_EQ(outcome.unopenable, "");
          EXPECT_TRUE(outcome.ended);
        }
      }
    }
  }
}

// A rank that votes while its flush is under way: the stores of the step then wait for the next
// vote, and that one for them.
TEST(SmallProtocol, VotingWithoutTheCommitIsADeadlock) {
  const SmallOutcome outcome = explore({.votes_without_commit = true});
  EXPECT_NE(outcome.deadlock, "");
}

// The other rank may have to go back to what this one has overwritten.
TEST(SmallProtocol, FreeingCopiesWithoutTheVoteLosesThem) {
  SmallProtocol wrong{.policy = SmallPolicy::kEager, .frees_without_vote = true};
  EXPECT_NE(explore(wrong).unopenable, "");
  wrong.ranks = 1;
  EXPECT_EQ(explore(wrong).unopenable, "");
}

TEST(SmallProtocol, ARecordOfWhatIsNotFlushedIsNone) {
  EXPECT_NE(explore({.ranks = 1, .skips_flush = true}).unopenable, "");
}

}  // namespace
}  // namespace sluice::test
