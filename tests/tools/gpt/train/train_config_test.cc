#include "tools/gpt/train/train_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "tests/support/expect_error.h"

namespace sluice {
namespace {

using test::expect_error;

TrainConfig schedule(std::uint64_t steps, std::uint64_t warmup_steps) {
  TrainConfig config;
  config.learning_rate = 1e-2;
  config.minimum_learning_rate = 1e-3;
  config.steps = steps;
  config.warmup_steps = warmup_steps;
  return config;
}

TEST(LearningRate, WarmsUpLinearly) {
  const TrainConfig config = schedule(100, 4);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 0), 0.25e-2);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 1), 0.5e-2);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 2), 0.75e-2);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 3), 1e-2);
}

TEST(LearningRate, FallsAlongACosine) {
  const TrainConfig config = schedule(105, 4);  // steps 4 to 104: progress 0 to 1 in hundredths
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 4), 1e-2);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 29),
                   1e-3 + 9e-3 * 0.5 * (1 + std::cos(0.25 * std::numbers::pi)));
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 54), 5.5e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 104), 1e-3);
  for (std::uint64_t step = 5; step < 105; ++step)
    EXPECT_LT(learning_rate_at(config, step), learning_rate_at(config, step - 1)) << step;
}

// A schedule that ends with the warm-up, or before it, has one step at the peak.
TEST(LearningRate, IsTheMinimumBehindTheScheduleHoweverShort) {
  for (std::uint64_t steps = 1; steps < 8; ++steps) {
    TrainConfig config = schedule(20, 4);
    config.schedule.steps = steps;
    EXPECT_DOUBLE_EQ(learning_rate_at(config, 4), 1e-2) << steps;
    for (std::uint64_t step = 7; step < 20; ++step)
      EXPECT_DOUBLE_EQ(learning_rate_at(config, step), 1e-3) << steps << " " << step;
  }
}

TEST(LearningRate, StaysInBoundsForEverySmallRun) {
  for (std::uint64_t steps = 1; steps < 12; ++steps) {
    for (std::uint64_t warmup = 0; warmup < 14; ++warmup) {
      const TrainConfig config = schedule(steps, warmup);
      for (std::uint64_t step = 0; step < steps; ++step) {
        const double rate = learning_rate_at(config, step);
        EXPECT_GT(rate, 0) << steps << " " << warmup << " " << step;
        EXPECT_LE(rate, config.learning_rate * (1 + 1e-15));
        if (step >= warmup) {
          EXPECT_GE(rate, config.minimum_learning_rate);
        }
      }
      // A run with at least two steps behind the warm-up ends at the minimum.
      if (steps >= warmup + 2) {
        EXPECT_DOUBLE_EQ(learning_rate_at(config, steps - 1), config.minimum_learning_rate);
      }
    }
  }
}

TEST(LearningRate, StaysOrFallsAlongALine) {
  TrainConfig config = schedule(14, 4);
  config.schedule.shape = ScheduleShape::kConstant;
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 1), 0.5e-2);
  EXPECT_EQ(learning_rate_at(config, 4), 1e-2);
  EXPECT_EQ(learning_rate_at(config, 400), 1e-2);
  config.schedule.shape = ScheduleShape::kLinear;
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 4), 1e-2);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 7), 1e-3 + 9e-3 * 2 / 3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 13), 1e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 400), 1e-3);
  config.schedule.steps = 24;  // of a longer run
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 23), 1e-3);
  EXPECT_GT(learning_rate_at(config, 13), 5e-3);
}

TEST(LearningRate, WarmsUpByTheLogarithmAndFromAStart) {
  TrainConfig config = schedule(100, 4);
  config.schedule.warmup = WarmupShape::kLog;
  for (const int step : {0, 1, 2, 3})
    EXPECT_DOUBLE_EQ(learning_rate_at(config, static_cast<std::uint64_t>(step)),
                     1e-2 * std::log(step + 2) / std::log(5));
  config.schedule.warmup_start = 2e-3;
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 0), 2e-3 + 8e-3 * std::log(2) / std::log(5));
  config.schedule.warmup = WarmupShape::kLinear;
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 0), 4e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 3), 1e-2);
}

TEST(LearningRate, ReadsEveryKeyOfTheSchedule) {
  const TrainConfig config = train_config(ConfigDocument(
      R"({"optimizer": {"schedule": "one_cycle", "schedule_steps": 3, "schedule_count": "deepspeed",
          "warmup": "log", "warmup_start": 0.5,
          "one_cycle": {"first_steps": 4, "second_steps": 5, "first_stairs": 6, "second_stairs": 7,
                        "decay_steps": 8, "decay_rate": 0.25},
          "range_test": {"step_size": 9, "step_rate": 0.125, "staircase": true}}})",
      "test"));
  EXPECT_EQ(describe(config.schedule), "3 1 1 0.5 3 | 4 5 6 7 8 0.25 | 9 0.125 true");
  const TrainConfig plain = train_config(ConfigDocument("{}", "test"));
  EXPECT_EQ(describe(plain.schedule), describe(ScheduleOptions{}));
  for (const auto& [name, shape] : {std::pair("constant", ScheduleShape::kConstant),
                                    std::pair("linear", ScheduleShape::kLinear),
                                    std::pair("range_test", ScheduleShape::kRangeTest)}) {
    ConfigDocument document("{}", "test");
    document.set(std::string("optimizer.schedule=") + name);
    EXPECT_EQ(train_config(document).schedule.shape, shape);
  }
}

TEST(TrainConfig, HasTheDefaultsOfTheSchema) {
  const TrainConfig read = train_config(ConfigDocument("{}", "test"));
  const TrainConfig plain;
  EXPECT_EQ(read.sequences, plain.sequences);
  EXPECT_EQ(read.micro_batches, plain.micro_batches);
  EXPECT_EQ(read.order, plain.order);
  EXPECT_EQ(read.engine.activations.home, ActivationHome::kKeep);
  EXPECT_TRUE(training_model(read).boundary_bytes.empty());
  EXPECT_EQ(read.learning_rate, plain.learning_rate);
  EXPECT_EQ(read.minimum_learning_rate, plain.minimum_learning_rate);
  EXPECT_EQ(read.warmup_steps, plain.warmup_steps);
  EXPECT_EQ(read.steps, plain.steps);
  EXPECT_EQ(read.seed, plain.seed);
  EXPECT_EQ(read.validation_fraction, plain.validation_fraction);
  EXPECT_EQ(read.data_format, plain.data_format);
  EXPECT_EQ(read.model.layers, plain.model.layers);
  EXPECT_EQ(read.model.heads, plain.model.heads);
  EXPECT_EQ(read.model.embedding, plain.model.embedding);
  EXPECT_EQ(read.model.context, plain.model.context);
  EXPECT_EQ(read.model.vocabulary, plain.model.vocabulary);
  EXPECT_EQ(read.model.tied_head, plain.model.tied_head);
}

TEST(TrainConfig, ReadsEveryKey) {
  const TrainConfig config = train_config(ConfigDocument(
      R"({"model": {"layers": 3, "heads": 4, "embedding": 32, "context": 5, "vocabulary": 7,
                    "tied_head": false},
          "data": {"file": "f", "format": "uint16", "validation_fraction": 0.25},
          "batch": {"sequences": 9, "micro_batches": 11, "order": "vertical"},
          "activations": "nvme",
          "optimizer": {"learning_rate": 0.5, "minimum_learning_rate": 0.125, "warmup_steps": 13},
          "run": {"steps": 17, "seed": 19}})",
      "test"));
  EXPECT_EQ(config.model.layers, 3u);
  EXPECT_EQ(config.model.heads, 4u);
  EXPECT_EQ(config.model.embedding, 32u);
  EXPECT_EQ(config.model.context, 5u);
  EXPECT_EQ(config.model.vocabulary, 7u);
  EXPECT_FALSE(config.model.tied_head);
  EXPECT_EQ(config.data_file, "f");
  EXPECT_EQ(config.data_format, TokenFormat::kUint16);
  EXPECT_EQ(config.validation_fraction, 0.25);
  EXPECT_EQ(config.sequences, 9u);
  EXPECT_EQ(config.micro_batches, 11u);
  EXPECT_EQ(config.order, MicroBatchOrder::kVertical);
  EXPECT_EQ(config.engine.activations.home, ActivationHome::kNvme);
  EXPECT_EQ(config.engine.activations.micro_batches, 11u);
  EXPECT_EQ(config.engine.activations.order, MicroBatchOrder::kVertical);
  EXPECT_EQ(training_model(config).boundary_bytes,
            std::vector<std::uint64_t>(4, 9 * 5 * 32 * sizeof(float)));
  EXPECT_EQ(config.learning_rate, 0.5);
  EXPECT_EQ(config.minimum_learning_rate, 0.125);
  EXPECT_EQ(config.warmup_steps, 13u);
  EXPECT_EQ(config.steps, 17u);
  EXPECT_EQ(config.seed, 19u);
}

TEST(TrainConfig, RefusesValuesThatDoNotFitTogether) {
  const auto read = [](const char* text) { (void)train_config(ConfigDocument(text, "test")); };
  EXPECT_NE(
      expect_error(ErrorCode::kConfig, [&] { read(R"({"model": {"heads": 7}})"); }).find("test:1:"),
      std::string::npos);
  (void)expect_error(ErrorCode::kConfig, [&] {
    read(R"({"optimizer": {"learning_rate": 1e-3, "minimum_learning_rate": 2e-3}})");
  });
  EXPECT_NE(expect_error(ErrorCode::kConfig,
                         [&] { read(R"({"batch": {"micro_batches": 2, "order": "vertical"}})"); })
                .find("choose \"recompute\", \"host\" or \"nvme\""),
            std::string::npos);
}

}  // namespace
}  // namespace sluice
