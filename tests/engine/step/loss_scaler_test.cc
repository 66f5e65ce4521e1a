// The sequence of scales over scripted overflows, against the published rules written out here as
// they stand in their sources.
#include "engine/step/loss_scaler.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include <sluice/error.h>

namespace sluice {
namespace {

// DeepSpeed until June 2025, runtime/fp16/loss_scaler.py, DynamicLossScaler.update_scale(), line by
// line.
struct DeepSpeedRule {
  double cur_scale;
  std::int64_t cur_iter = 0;
  std::int64_t last_overflow_iter = -1;
  double scale_factor = 2;
  std::int64_t scale_window;
  double min_scale;
  std::uint32_t delayed_shift;
  std::uint32_t cur_hysteresis;
  bool consecutive_hysteresis;
  bool raised = false;

  void update_scale(bool overflow) {
    if (overflow) {
      if (delayed_shift == 1 || cur_hysteresis == 1) {
        if (cur_scale == min_scale) {
          raised = true;
          return;
        }
        cur_scale = std::max(cur_scale / scale_factor, min_scale);
      } else {
        cur_hysteresis -= 1;
      }
      last_overflow_iter = cur_iter;
    } else {
      if (consecutive_hysteresis) cur_hysteresis = delayed_shift;
      if ((cur_iter - last_overflow_iter) % scale_window == 0) {
        if (!consecutive_hysteresis) cur_hysteresis = delayed_shift;
        cur_scale *= scale_factor;
      }
    }
    cur_iter += 1;
  }
};

// PyTorch, aten _amp_update_scale_: growth tracker, growth factor 2, backoff factor 0.5.
struct GradScalerRule {
  float scale;
  int growth_interval;
  int growth_tracker = 0;

  void update(bool found_inf) {
    if (found_inf) {
      scale = scale * 0.5f;
      growth_tracker = 0;
      return;
    }
    const int successful = growth_tracker + 1;
    if (successful == growth_interval) {
      const float new_scale = scale * 2.0f;
      if (new_scale <= std::numeric_limits<float>::max()) scale = new_scale;
      growth_tracker = 0;
    } else {
      growth_tracker = successful;
    }
  }
};

TEST(LossScaler, FollowsDeepSpeedStepByStep) {
  for (std::uint32_t script = 0; script < 400; ++script) {
    std::mt19937 random(script);
    const LossScaleOptions options{
        .static_scale = 0,
        .initial_scale_power = static_cast<std::uint32_t>(4 + random() % 20),
        .window = static_cast<std::uint32_t>(1 + random() % 7),
        .hysteresis = static_cast<std::uint32_t>(1 + random() % 4),
        .consecutive_hysteresis = random() % 2 == 0,
        .minimum = random() % 2 == 0 ? 1.0 : 64.0};
    if (std::ldexp(1.0, static_cast<int>(options.initial_scale_power)) < options.minimum) continue;
    LossScaler scaler(options);
    DeepSpeedRule rule{.cur_scale = scaler.scale(),
                       .scale_window = options.window,
                       .min_scale = options.minimum,
                       .delayed_shift = options.hysteresis,
                       .cur_hysteresis = options.hysteresis,
                       .consecutive_hysteresis = options.consecutive_hysteresis};
    const std::uint32_t one_in = 2 + script % 7;
    for (int step = 0; step < 120 && rule.cur_scale < 0x1p100; ++step) {
      const bool overflow = random() % one_in == 0;
      rule.update_scale(overflow);
      if (rule.raised) {
        EXPECT_THROW(scaler.update(overflow), Error);
        break;
      }
      scaler.update(overflow);
      ASSERT_EQ(scaler.scale(), rule.cur_scale) << "script " << script << ", step " << step;
    }
  }
}

TEST(LossScaler, WithoutHysteresisFollowsGradScaler) {
  for (std::uint32_t script = 0; script < 200; ++script) {
    std::mt19937 random(script);
    const int interval = 1 + static_cast<int>(random() % 9);
    LossScaler scaler({.static_scale = 0,
                       .window = static_cast<std::uint32_t>(interval),
                       .hysteresis = 1,
                       .consecutive_hysteresis = script % 2 == 0,
                       .minimum = 0});
    GradScalerRule rule{.scale = 65536, .growth_interval = interval};
    const std::uint32_t one_in = 2 + script % 9;
    for (int step = 0; step < 400; ++step) {
      const bool overflow = random() % one_in == 0;
      scaler.update(overflow);
      rule.update(overflow);
      if (rule.scale < std::numeric_limits<float>::min() * 4) break;
      ASSERT_EQ(scaler.scale(), static_cast<double>(rule.scale))
          << "script " << script << ", step " << step;
    }
  }
}

// By hand: hysteresis 2, window 3.
TEST(LossScaler, WorkedExample) {
  LossScaler scaler({.static_scale = 0, .initial_scale_power = 4, .window = 3, .hysteresis = 2});
  const std::pair<bool, double> steps[] = {{true, 16}, {true, 8},  {true, 4},  {false, 4},
                                           {false, 4}, {false, 8}, {true, 8},  {false, 8},
                                           {true, 4},  {false, 4}, {false, 4}, {false, 8}};
  int number = 0;
  for (const auto& [overflow, expected] : steps) {
    scaler.update(overflow);
    EXPECT_EQ(scaler.scale(), expected) << "step " << number;
    ++number;
  }
}

TEST(LossScaler, StaticScaleStays) {
  LossScaler scaler({.static_scale = 128});
  for (int step = 0; step < 3000; ++step) scaler.update(step % 2 == 0);
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScaler, OverflowAtTheMinimumIsAnError) {
  LossScaler scaler({.static_scale = 0, .initial_scale_power = 1, .hysteresis = 1, .minimum = 1});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_THROW(scaler.update(true), Error);
}

// No power of two lies there: the scale stops at it, and not at the half below.
TEST(LossScaler, IsNotHalvedBelowTheMinimum) {
  LossScaler scaler({.static_scale = 0, .initial_scale_power = 2, .hysteresis = 1, .minimum = 3});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 3);
  EXPECT_THROW(scaler.update(true), Error);
}

TEST(LossScaler, AStaticScaleStaysAlsoBelowTheMinimum) {
  LossScaler scaler({.static_scale = 2, .minimum = 8});
  scaler.update(/*has_overflowed=*/true);
  scaler.update(/*has_overflowed=*/false);
  EXPECT_EQ(scaler.scale(), 2);
}

}  // namespace
}  // namespace sluice
