#include "engine/plan/schedule.h"

#include <gtest/gtest.h>

#include "engine/plan/commit_turn.h"

namespace sluice {
namespace {

TEST(Schedule, MarksFirstAndFinalGradientsOverMicroBatchesAndRepeatedUses) {
  ModelSpec model;
  model.units.push_back({"a", {{.name = "a.w", .shape = {1}}}});
  model.units.push_back({"b", {{.name = "b.w", .shape = {1}}}});
  model.forward_order = {UnitId{0}, UnitId{1}, UnitId{0}};  // a is used twice
  const Schedule schedule = training_schedule(validated(model), 2);
  ASSERT_EQ(schedule.size(), 12u);
  const auto expect = [&](std::size_t use, std::uint32_t unit, Pass pass, bool first, bool final) {
    EXPECT_EQ(schedule[use].unit, UnitId{unit}) << use;
    EXPECT_EQ(schedule[use].pass, pass) << use;
    EXPECT_EQ(schedule[use].first_gradient, first) << use;
    EXPECT_EQ(schedule[use].final_gradient, final) << use;
  };
  expect(0, 0, Pass::kForward, false, false);
  expect(2, 0, Pass::kForward, false, false);
  expect(3, 0, Pass::kBackward, true, false);
  expect(4, 1, Pass::kBackward, true, false);
  expect(5, 0, Pass::kBackward, false, false);
  expect(9, 0, Pass::kBackward, false, false);
  expect(10, 1, Pass::kBackward, false, true);
  expect(11, 0, Pass::kBackward, false, true);
}

TEST(Schedule, InferenceIsOneForwardPass) {
  ModelSpec model;
  model.units.push_back({"a", {{.name = "a.w", .shape = {1}}}});
  const Schedule schedule = inference_schedule(validated(model));
  ASSERT_EQ(schedule.size(), 1u);
  EXPECT_EQ(schedule[0].pass, Pass::kInference);
}

TEST(CommitTurn, ComesAfterTheFetchesAndBeforeTheFirstStores) {
  ModelSpec model;
  model.units.push_back({"a", {{.name = "a.w", .shape = {1}}}});
  model.units.push_back({"b", {{.name = "b.w", .shape = {1}}}});
  model.forward_order = {UnitId{0}, UnitId{1}, UnitId{0}};
  model = validated(model);
  const Schedule one = training_schedule(model, 1);
  const Schedule two = training_schedule(model, 2);
  const Schedule vertical = training_schedule(model, 2, MicroBatchOrder::kVertical);
  const OverlapPolicy late = OverlapPolicy::kDeferred;
  EXPECT_EQ(uses_before_commit(one, late), 6u);
  EXPECT_EQ(uses_before_commit(two, late), 6u);  // of 12
  EXPECT_EQ(uses_before_commit(vertical, late), 12u);
  Schedule again = one;  // backward runs a forward again in its middle
  again.insert(again.begin() + 4, again[0]);
  EXPECT_EQ(uses_before_commit(again, late), 7u);
  for (const OverlapPolicy early : {OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
    EXPECT_EQ(uses_before_commit(one, early), 3u);
    EXPECT_EQ(uses_before_commit(two, early), 3u);
    EXPECT_EQ(uses_before_commit(vertical, early), 6u);
  }
  EXPECT_EQ(uses_before_commit({}, OverlapPolicy::kDeferred), 0u);
  EXPECT_EQ(uses_before_commit(one, OverlapPolicy::kSerial), 0u);  // all is stored before
}

TEST(CommitTurn, DoesNotWaitWhereThreeFlushesTakeMoreThanAThirdOfAStep) {
  EXPECT_TRUE(commit_may_wait(0.005, 0.7));
  EXPECT_TRUE(commit_may_wait(0, 0));
  EXPECT_FALSE(commit_may_wait(0.2, 1.7));
  EXPECT_FALSE(commit_may_wait(0.005, 0.04));
}

}  // namespace
}  // namespace sluice
