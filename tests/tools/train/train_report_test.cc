// The sentences that `sluice train` ends with, from figures that are set by hand.
#include "tools/gpt/train/train_report.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace sluice {
namespace {

constexpr std::int64_t kStep_ns = 100'000'000;

// Steps of 100 ms, after a first one of a second, against limits of so many seconds.
std::string report_of(double least_s, double bound_s) {
  RunRecord run;
  run.steps.resize(3);
  for (StepRecord& step : run.steps) {
    step.times.total_ns = kStep_ns;
    step.times.compute_ns = kStep_ns / 2;
    step.times.other_ns = kStep_ns / 2;
  }
  run.steps.front().times.total_ns = 10 * kStep_ns;
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

TEST(TimeReport, AShareAboveOneHundredPercentIsCalledNoise) {
  const auto is_noise = [](const std::string& text) {
    return text.find("a share above 100 % is noise") != std::string::npos;
  };
  EXPECT_FALSE(is_noise(report_of(0.08, 0.1)));
  EXPECT_TRUE(is_noise(report_of(0.08, 0.102)));
  EXPECT_TRUE(is_noise(report_of(0.19, 0.09)));
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
