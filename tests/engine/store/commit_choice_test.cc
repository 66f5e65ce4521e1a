#include "engine/store/commit_choice.h"

#include <gtest/gtest.h>

#include "tests/engine/store/commit_samples.h"
#include "tests/support/expect_error.h"

namespace sluice::test {
namespace {

CommitReading whole(std::uint64_t generation, std::uint64_t step,
                    CommitKind kind = CommitKind::kState) {
  CommitRecord record = sample_commit(generation, generation, step);
  record.kind = kind;
  return decode_commit(encoded(record));
}
CommitReading damaged() {
  return {.state = CommitState::kDamaged, .problem = "torn"};
}

FoundCommits found(CommitReading a, CommitReading a_twin, CommitReading b, CommitReading b_twin) {
  FoundCommits all;
  all.names = {"/a/x.commit", "/b/x.commit"};
  all.readings[0] = {std::move(a), std::move(a_twin)};
  all.readings[1] = {std::move(b), std::move(b_twin)};
  return all;
}

TEST(CommitChoice, OfNothingIsNone) {
  const CommitChoice choice = choose_commit(found({}, {}, {}, {}));
  EXPECT_FALSE(choice.newest);
  EXPECT_EQ(choice.next_slot, 0u);
  EXPECT_EQ(choice.next_generation, 1u);
  // The first record was torn.
  EXPECT_FALSE(choose_commit(found(damaged(), {}, {}, {})).newest);
}

TEST(CommitChoice, TakesTheNewestAndWritesOverTheOther) {
  const CommitChoice choice =
      choose_commit(found(whole(7, 3), whole(7, 3), whole(6, 2), whole(6, 2)));
  EXPECT_EQ(choice.newest, 0u);
  EXPECT_EQ(choice.older, 1u);
  EXPECT_EQ(choice.next_slot, 1u);
  EXPECT_EQ(choice.next_generation, 8u);
  EXPECT_TRUE(choice.mends.empty());
}

TEST(CommitChoice, ACutWithinTheTwinsLeavesOneOfThem) {
  // The first twin of generation 8 is torn: 7 is the newest.
  CommitChoice choice = choose_commit(found(whole(7, 3), whole(7, 3), damaged(), whole(6, 2)));
  EXPECT_EQ(choice.newest, 0u);
  EXPECT_EQ(choice.mends, (std::vector<SlotTwin>{{1, 0}}));
  // The second one is, or has not been begun.
  choice = choose_commit(found(whole(7, 3), whole(7, 3), whole(8, 4), damaged()));
  EXPECT_EQ(choice.newest, 1u);
  EXPECT_EQ(choice.mends, (std::vector<SlotTwin>{{1, 1}}));
  choice = choose_commit(found(whole(7, 3), whole(7, 3), whole(8, 4), whole(6, 2)));
  EXPECT_EQ(choice.newest, 1u);
  EXPECT_EQ(choice.mends, (std::vector<SlotTwin>{{1, 1}}));
  EXPECT_EQ(choice.next_slot, 0u);
}

TEST(CommitChoice, AVoidRecordTakesItsSlotBack) {
  const auto nothing = CommitKind::kVoid;
  // Written to one twin only: it counts.
  const CommitChoice choice =
      choose_commit(found(whole(7, 3), whole(7, 3), whole(9, 4, nothing), whole(8, 4)));
  EXPECT_EQ(choice.newest, 0u);
  EXPECT_FALSE(choice.older);
  EXPECT_EQ(choice.next_slot, 1u);
  EXPECT_EQ(choice.next_generation, 10u);
  EXPECT_EQ(choice.mends, (std::vector<SlotTwin>{{1, 1}}));
}

TEST(CommitChoice, BothTwinsDamagedIsAnErrorWhateverTheOtherSlotHolds) {
  const std::string message = expect_error(ErrorCode::kDamaged, [] {
    (void)choose_commit(found(whole(7, 3), whole(7, 3), damaged(), damaged()));
  });
  EXPECT_NE(message.find("/b/x.commit"), std::string::npos) << message;
}

TEST(CommitChoice, ContradictionsAreErrors) {
  CommitRecord other = sample_commit(7, 7, 3);
  other.settings += "!";
  expect_error(ErrorCode::kDamaged, [&] {
    (void)choose_commit(found(whole(7, 3), decode_commit(encoded(other)), {}, {}));
  });
  expect_error(ErrorCode::kDamaged, [&] {
    (void)choose_commit(found(whole(7, 3), whole(7, 3), whole(7, 3), whole(7, 3)));
  });
  other.store_id[0] ^= 1;
  const std::string message = expect_error(ErrorCode::kInput, [&] {
    (void)choose_commit(found(whole(6, 2), whole(6, 2), decode_commit(encoded(other)), {}));
  });
  EXPECT_NE(message.find(text_of(other.store_id)), std::string::npos) << message;
  CommitReading foreign{.state = CommitState::kForeign, .problem = "it has version 9"};
  expect_error(ErrorCode::kUnsupported,
               [&] { (void)choose_commit(found(foreign, foreign, {}, {})); });
}

TEST(CommonStep, IsTheNewestThatAllHave) {
  using Offers = std::vector<CommitOffer>;
  EXPECT_EQ(common_step(Offers{{5, 4}, {5, 4}}), 5u);
  EXPECT_EQ(common_step(Offers{{5, 4}, {4, 3}, {5, {}}}), std::nullopt);
  EXPECT_EQ(common_step(Offers{{5, 4}, {4, 3}, {5, 4}}), 4u);
  EXPECT_EQ(common_step(Offers{{4, {}}, {5, 4}}), 4u);
  EXPECT_EQ(common_step(Offers{{{}, {}}, {0, {}}}), std::nullopt);
  EXPECT_EQ(common_step(Offers{{0, {}}, {0, {}}}), 0u);
}

// Commits of steps 90 and 100, then those of a restored state: 95, 100, 105.
TEST(CommonStep, OfARestoredStateIsNeverOneThatItHasReplaced) {
  using Offers = std::vector<CommitOffer>;
  // Not all ranks have the restored state: the old 100 is whole everywhere.
  EXPECT_EQ(common_step(Offers{{95, 100}, {100, 90}}), 100u);
  EXPECT_EQ(common_step(Offers{{100, 90}, {95, 100}}), 100u);
  EXPECT_EQ(common_step(Offers{{95, 100}, {100, {}}}), 100u);
  // All ranks have it.
  EXPECT_EQ(common_step(Offers{{95, 100}, {95, 100}}), 95u);
  EXPECT_EQ(common_step(Offers{{100, 95}, {95, 100}}), 95u);
  EXPECT_EQ(common_step(Offers{{95, 100}, {100, 95}, {95, 100}}), 95u);
  EXPECT_EQ(common_step(Offers{{100, 95}, {95, {}}}), 95u);
  EXPECT_EQ(common_step(Offers{{100, 95}, {100, 95}}), 100u);
  EXPECT_EQ(common_step(Offers{{105, 100}, {100, 95}}), 100u);
}

}  // namespace
}  // namespace sluice::test
