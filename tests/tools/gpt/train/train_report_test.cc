// The sentences that `sluice train` ends with, from figures that are set by hand.
#include "tools/gpt/train/train_report.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace sluice {
namespace {

constexpr std::int64_t kStep_ns = 100'000'000;

// Before the last step.
struct Between {
  std::int64_t between_ns = 0;
  std::int64_t drained_ns = 0;  // the part that the step before has waited for
};

// Steps of 100 ms, after a first one of a second, against limits of so many seconds.
std::string report_of(double least_s, double bound_s, const Between& between = {}) {
  RunRecord run;
  run.steps.resize(3);
  for (StepRecord& step : run.steps) {
    step.times.total_ns = kStep_ns;
    step.times.compute_ns = kStep_ns / 2;
    step.times.other_ns = kStep_ns / 2;
  }
  run.steps.front().times.total_ns = 10 * kStep_ns;
  run.steps.back().times.work_before.any_ns = between.between_ns;
  run.steps[1].drained_ns = between.drained_ns;
  run.limits.emplace();
  run.limits->least.step_s = least_s;
  run.limits->bound.step_s = bound_s;
  return time_report(run);
}

TEST(TimeReport, SharesAreOfTheMeanStepWithoutTheFirst) {
  const std::string text = report_of(0.08, 0.09);
  EXPECT_NE(text.find("the mean step of 0.100 s reaches 80.0 % of 0.080 s (T_min, "),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("90.0 % of 0.090 s (T_bound, "), std::string::npos) << text;
}

TEST(TimeReport, AShareAboveOneHundredPercentHasItsReason) {
  const auto says = [](const std::string& text, const std::string& words) {
    return text.find(words) != std::string::npos;
  };
  EXPECT_FALSE(says(report_of(0.08, 0.1), "a share"));
  EXPECT_TRUE(says(report_of(0.08, 0.102), "a share above 100 % is noise"));
  EXPECT_TRUE(says(report_of(0.109, 0.09), "a share above 100 % is noise"));
  EXPECT_TRUE(says(report_of(0.19, 0.09), "a share this far above 100 %"));
  // Work of updates between the steps, that a step waits for or that is in no step.
  const std::int64_t between_ns = kStep_ns / 5;
  EXPECT_TRUE(says(report_of(0.13, 0.1, {.between_ns = between_ns}),
                   "updates went on for 0.010 s per step between the steps"));
  EXPECT_FALSE(says(report_of(0.13, 0.1, {.between_ns = between_ns, .drained_ns = between_ns}),
                    "between the steps"));
}

TEST(TimeReport, SkippedStepsAreNotComparedWithAStepThatHasAnUpdate) {
  RunRecord run;
  run.steps.resize(6);
  for (StepRecord& step : run.steps) step.times.total_ns = kStep_ns;
  run.steps[2].skipped = true;
  for (const std::size_t place : {2, 3}) run.steps[place].times.total_ns = kStep_ns / 10;
  run.limits.emplace();
  run.limits->least.step_s = run.limits->bound.step_s = 0.05;
  const std::string text = time_report(run);
  EXPECT_NE(text.find("the mean step of 0.100 s, without 2 that were skipped or came right after "
                      "one, reaches 50.0 % of"),
            std::string::npos)
      << text;
  for (StepRecord& step : run.steps) step.skipped = true;
  EXPECT_NE(time_report(run).find("no two steps in a row had an update"), std::string::npos);
}

TEST(TimeReport, TheLeastComputationStandsForTrainingInMemory) {
  RunRecord run;
  run.steps.resize(4);
  for (StepRecord& step : run.steps) step.times.total_ns = kStep_ns;
  // The first step does not count.
  const std::int64_t compute_ns[] = {kStep_ns / 10, kStep_ns / 2, kStep_ns / 4, kStep_ns / 2};
  for (std::size_t i = 0; i < run.steps.size(); ++i) run.steps[i].times.compute_ns = compute_ns[i];
  EXPECT_NE(time_report(run).find("takes 0.025 s, 25.0 % of the mean step; --compare-memory"),
            std::string::npos)
      << time_report(run);
  run.in_memory.emplace();  // measured, so not estimated
  EXPECT_EQ(time_report(run).find("--compare-memory"), std::string::npos);
}

TEST(BarLine, NarrowTerminalsHaveTheFigures) {
  StepRecord record;
  record.step = 12;
  record.loss = 2.5;
  EXPECT_EQ(bar_line(record, 1000, 60, 200).substr(0, 36), "[........................] 12/1000  ");
  EXPECT_EQ(bar_line(record, 1000, 60, 79).substr(0, 27), "[........................] ");
  for (const std::size_t columns : {49u, 39u, 19u}) {
    const std::string line = bar_line(record, 1000, 60, columns);
    EXPECT_EQ(line.find("12/1000  "), 0u) << line;
    EXPECT_LE(line.size(), columns);
  }
}

}  // namespace
}  // namespace sluice
