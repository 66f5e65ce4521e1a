#include "engine/plan/update_policy.h"

#include <gtest/gtest.h>

namespace sluice {
namespace {

double clip_factor(double norm, double clip_norm, double clip_epsilon) {
  Config::Optimizer config;
  config.clip_norm = clip_norm;
  config.clip_epsilon = clip_epsilon;
  return UpdatePolicy(config, /*may_be_tentative=*/false).clip_factor(norm);
}

TEST(ClipFactor, BoundsTheNorm) {
  EXPECT_EQ(clip_factor(1, 2, 0), 1);
  EXPECT_EQ(clip_factor(2, 2, 0), 1);
  EXPECT_EQ(clip_factor(8, 2, 0), 0.25);
  EXPECT_EQ(clip_factor(8, 0, 0.5), 1);
}

// As PyTorch's clip_grad_norm_ and DeepSpeed: max / (norm + epsilon), at most 1.
TEST(ClipFactor, AddsTheEpsilonToTheNorm) {
  EXPECT_EQ(clip_factor(1, 2, 0.5), 1);
  EXPECT_EQ(clip_factor(1.5, 2, 0.5), 1);
  EXPECT_EQ(clip_factor(2, 2, 0.5), 2 / 2.5);
  EXPECT_EQ(clip_factor(7.5, 2, 0.5), 0.25);
}

}  // namespace
}  // namespace sluice
