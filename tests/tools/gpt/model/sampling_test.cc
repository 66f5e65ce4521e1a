#include "tools/gpt/model/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace sluice::gpt {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 3.0f, -2.0f};

std::vector<double> frequencies(const SamplingOptions& options) {
  constexpr int kDraws = 20'000;
  std::vector<double> counts(kLogits.size());
  for (int i = 0; i < kDraws; ++i)
    counts[sample_token(kLogits, options, static_cast<std::uint64_t>(i))] += 1.0 / kDraws;
  return counts;
}

TEST(Sampling, TemperatureZeroTakesTheFirstLargest) {
  for (std::uint64_t position = 0; position < 20; ++position)
    EXPECT_EQ(sample_token(kLogits, {.temperature = 0}, position), 1u);
}

TEST(Sampling, FollowsTheSoftmax) {
  for (const double temperature : {0.5, 1.0, 2.0}) {
    double total = 0;
    for (const float logit : kLogits) total += std::exp(logit / temperature);
    const std::vector<double> counts = frequencies({.temperature = temperature, .seed = 5});
    for (std::size_t i = 0; i < kLogits.size(); ++i)
      EXPECT_NEAR(counts[i], std::exp(kLogits[i] / temperature) / total, 0.02);
  }
}

TEST(Sampling, TopKDropsTheRest) {
  const std::vector<double> counts = frequencies({.top_k = 3});
  EXPECT_EQ(counts[0], 0.0);
  EXPECT_EQ(counts[4], 0.0);
  EXPECT_GT(counts[2], 0.1);
  EXPECT_EQ(sample_token(kLogits, {.top_k = 1}, 3), 1u);
  EXPECT_LT(sample_token(kLogits, {.top_k = 100}, 3), kLogits.size());
}

TEST(Sampling, DependsOnSeedAndPositionAlone) {
  bool differs = false;
  for (std::uint64_t position = 0; position < 50; ++position) {
    const std::uint32_t token = sample_token(kLogits, {.seed = 1}, position);
    EXPECT_EQ(token, sample_token(kLogits, {.seed = 1}, position));
    differs = differs || token != sample_token(kLogits, {.seed = 2}, position);
  }
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace sluice::gpt
