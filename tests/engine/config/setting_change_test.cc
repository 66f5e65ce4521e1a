#include <gtest/gtest.h>

#include "engine/config/learning_rate.h"
#include "engine/config/setting_change.h"

namespace sluice {
namespace {

using Changes = std::vector<std::string>;

TEST(SettingChange, ASettingOfOneValueIsNamedAsItIs) {
  EXPECT_EQ(setting_change("optimizer.beta2", "0.999", "0.95"),
            Changes{"optimizer.beta2 was 0.999 and is 0.95"});
}

TEST(SettingChange, EveryPartOfAScheduleHasItsKey) {
  const ScheduleOptions before;
  ScheduleOptions after;
  after.shape = ScheduleShape::kOneCycle;
  after.count = ScheduleCount::kDeepspeed;
  after.warmup = WarmupShape::kLog;
  after.warmup_start = 0.5;
  after.steps = 7;
  after.one_cycle = {.first_steps = 1,
                     .second_steps = 2,
                     .first_stairs = 3,
                     .second_stairs = 4,
                     .decay_steps = 5,
                     .decay_rate = 6};
  after.range_test = {.step_size = 8, .step_rate = 9, .is_staircase = true};
  EXPECT_EQ(
      setting_change("optimizer.schedule", describe(before), describe(after)),
      (Changes{"optimizer.schedule was cosine and is one_cycle",
               "optimizer.schedule_count was sluice and is deepspeed",
               "optimizer.warmup was linear and is log", "optimizer.warmup_start was 0 and is 0.5",
               "optimizer.schedule_steps was run.steps and is 7",
               "optimizer.one_cycle.first_steps was 2000 and is 1",
               "optimizer.one_cycle.second_steps was 2000 and is 2",
               "optimizer.one_cycle.first_stairs was 0 and is 3",
               "optimizer.one_cycle.second_stairs was 0 and is 4",
               "optimizer.one_cycle.decay_steps was 0 and is 5",
               "optimizer.one_cycle.decay_rate was 0 and is 6",
               "optimizer.range_test.step_size was 2000 and is 8",
               "optimizer.range_test.step_rate was 1 and is 9",
               "optimizer.range_test.staircase was false and is true"}));
}

TEST(SettingChange, ThePartsOfALossScaleHaveKeys) {
  EXPECT_EQ(setting_change("precision.loss_scale", "1 16 1000 2 false 1", "0 16 500 2 false 1"),
            (Changes{"precision.loss_scale.static was 1 and is moving",
                     "precision.loss_scale.window was 1000 and is 500"}));
}

TEST(SettingChange, GroupsSayTheirTensorsAndNumbers) {
  EXPECT_EQ(setting_change("optimizer.groups[1]", "a.* b 0.5 -1", "a.* 2 0"),
            Changes{"optimizer.groups[1] was \"a.* b\" with learning_rate_factor 0.5 and is "
                    "\"a.*\" with learning_rate_factor 2 and weight_decay 0"});
}

TEST(SettingChange, TextsOfOtherVersionsAreShownWhole) {
  EXPECT_EQ(setting_change("precision.loss_scale", "nothing", "1 16 1000 2 false 1"),
            Changes{"precision.loss_scale was nothing and is 1 16 1000 2 false 1"});
  EXPECT_EQ(
      setting_change("optimizer.groups[0]", "a.* 0.5 -1", "nothing"),
      Changes{"optimizer.groups[0] was \"a.*\" with learning_rate_factor 0.5 and is nothing"});
}

}  // namespace
}  // namespace sluice
