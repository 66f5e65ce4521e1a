#include "engine/store/plane_copies.h"

#include <gtest/gtest.h>

namespace sluice::test {
namespace {

constexpr auto kNo = PlaneCopies::InPlace::kNo;
constexpr auto kYes = PlaneCopies::InPlace::kYes;

TEST(PlaneCopies, WithTwoAStoreWaitsForTheCommitBefore) {
  PlaneCopies copies(1, 2);
  copies.begin_commit();  // step 0 names copy 0
  copies.end_commit();
  EXPECT_EQ(copies.target(0, kYes), 1);
  copies.stored(0, 1);  // step 1
  copies.begin_commit();
  EXPECT_EQ(copies.named(0), 0);
  EXPECT_EQ(copies.named_by_next(0), 1);
  EXPECT_EQ(copies.target(0, kYes), std::nullopt);  // both are named
  copies.end_commit();
  EXPECT_EQ(copies.target(0, kYes), 0);
}

TEST(PlaneCopies, WithThreeItDoesNot) {
  PlaneCopies copies(1, 3);
  copies.begin_commit();
  copies.end_commit();
  copies.stored(0, *copies.target(0, kNo));
  copies.begin_commit();
  const auto third = copies.target(0, kNo);
  ASSERT_EQ(third, 2);
  copies.stored(0, 2);
  EXPECT_EQ(copies.target(0, kNo), std::nullopt);
  EXPECT_EQ(copies.target(0, kYes), 2);  // no commit names it yet
}

TEST(PlaneCopies, BetweenCommitsTheOtherCopyIsOverwrittenInPlace) {
  PlaneCopies copies(1, 2);
  copies.begin_commit();
  copies.end_commit();
  copies.stored(0, 1);
  EXPECT_EQ(copies.target(0, kNo), std::nullopt);  // speculation has no room
  EXPECT_EQ(copies.target(0, kYes), 1);
}

TEST(PlaneCopies, WhatIsRestoredIsHomeAndNamed) {
  PlaneCopies copies(2, 2);
  copies.restore(1, 1);
  EXPECT_EQ(copies.home(1), 1);
  EXPECT_EQ(copies.target(1, kYes), 0);
  EXPECT_EQ(copies.target(0, kYes), 1);
}

TEST(PlaneCopiesDeathTest, NoCommitIsOverwritten) {
  PlaneCopies copies(1, 2);
  copies.begin_commit();
  EXPECT_DEATH(copies.stored(0, 0), "without a name");
  EXPECT_DEATH(copies.begin_commit(), "one commit");
}

}  // namespace
}  // namespace sluice::test
