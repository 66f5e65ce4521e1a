#include "base/optimizer_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>

namespace sluice {
namespace {

constexpr double kUnit = 0x1p-24;  // the relative error of one fp32 rounding

class RandomElements {
 public:
  AdamElement state() {
    return {normal_(random_), 0.1f * normal_(random_), std::fabs(0.01f * normal_(random_))};
  }
  float gradient() { return normal_(random_); }
  AdamCoefficients coefficients() {
    const std::uint64_t step = 1 + random_() % 5000;
    return adam_coefficients({.weight_decay = random_() % 2 == 0 ? 0.0 : 0.1}, 1e-3, step,
                             random_() % 2 == 0 ? 1.0f : 0.37f);
  }

 private:
  std::mt19937 random_{3};
  std::normal_distribution<float> normal_;
};

// Stage by stage, each from the fp32 results of the one before, so that cancellation in one does
// not hide an error in the next.
TEST(AdamElement, IsWithinRoundingOfDoubleArithmetic) {
  RandomElements elements;
  for (int i = 0; i < 1'000'000; ++i) {
    const AdamCoefficients c = elements.coefficients();
    const AdamElement state = elements.state();
    const float gradient = elements.gradient();
    const AdamElement updated = adam_element(c, state, gradient);

    const double g = static_cast<double>(gradient) * c.gradient_scale;
    const double kept = static_cast<double>(c.beta1) * state.exp_avg;
    const double added = c.one_minus_beta1 * g;
    ASSERT_NEAR(updated.exp_avg, kept + added, 4 * kUnit * (std::fabs(kept) + std::fabs(added)));

    const double exp_avg_sq =
        static_cast<double>(c.beta2) * state.exp_avg_sq + c.one_minus_beta2 * g * g;
    ASSERT_NEAR(updated.exp_avg_sq, exp_avg_sq, 6 * kUnit * exp_avg_sq);

    const double denominator =
        std::sqrt(static_cast<double>(updated.exp_avg_sq)) * c.inverse_sqrt_correction2 + c.epsilon;
    const double decayed = static_cast<double>(state.master) * c.decay_factor;
    const double moved = c.step_size * (updated.exp_avg / denominator);
    ASSERT_NEAR(updated.master, decayed - moved,
                6 * kUnit * (std::fabs(decayed) + std::fabs(moved)));
  }
}

// Each operation through memory, so that no compiler flag can fuse two of them.
AdamElement element_with_every_rounding(const AdamCoefficients& c, AdamElement state,
                                        float gradient) {
  const auto rounded = [](float value) {
    volatile float stored = value;
    return stored;
  };
  const float g = rounded(gradient * c.gradient_scale);
  const float exp_avg = rounded(rounded(c.beta1 * state.exp_avg) + rounded(c.one_minus_beta1 * g));
  const float exp_avg_sq =
      rounded(rounded(c.beta2 * state.exp_avg_sq) + rounded(rounded(c.one_minus_beta2 * g) * g));
  const float root = rounded(std::sqrt(exp_avg_sq));
  const float denominator = rounded(rounded(root * c.inverse_sqrt_correction2) + c.epsilon);
  const float master = rounded(rounded(state.master * c.decay_factor) -
                               rounded(c.step_size * rounded(exp_avg / denominator)));
  return {master, exp_avg, exp_avg_sq};
}

// The values that a compiler which contracts a*b + c would compute for three of the sums.
AdamElement element_with_fused_sums(const AdamCoefficients& c, AdamElement state, float gradient) {
  AdamElement fused = element_with_every_rounding(c, state, gradient);
  volatile float g = gradient * c.gradient_scale;
  volatile float weighted = c.one_minus_beta2 * g;
  volatile float root = std::sqrt(fused.exp_avg_sq);
  const float denominator = std::fma(root, c.inverse_sqrt_correction2, c.epsilon);
  volatile float ratio = fused.exp_avg / denominator;
  fused.exp_avg = std::fma(c.beta1, state.exp_avg, c.one_minus_beta1 * g);
  fused.exp_avg_sq = std::fma(weighted, g, c.beta2 * state.exp_avg_sq);
  fused.master = std::fma(-c.step_size, ratio, state.master * c.decay_factor);
  return fused;
}

// Fails when the code is compiled with contraction for a processor that has fused multiply-add.
TEST(AdamElement, RoundsAfterEveryOperation) {
  RandomElements elements;
  int exp_avg_differs = 0;
  int exp_avg_sq_differs = 0;
  int master_differs = 0;
  for (int i = 0; i < 200'000; ++i) {
    const AdamCoefficients c = elements.coefficients();
    const AdamElement state = elements.state();
    const float gradient = elements.gradient();
    const AdamElement updated = adam_element(c, state, gradient);
    const AdamElement expected = element_with_every_rounding(c, state, gradient);
    ASSERT_EQ(bits_from_float(updated.exp_avg), bits_from_float(expected.exp_avg));
    ASSERT_EQ(bits_from_float(updated.exp_avg_sq), bits_from_float(expected.exp_avg_sq));
    ASSERT_EQ(bits_from_float(updated.master), bits_from_float(expected.master));
    const AdamElement fused = element_with_fused_sums(c, state, gradient);
    exp_avg_differs += fused.exp_avg != expected.exp_avg ? 1 : 0;
    exp_avg_sq_differs += fused.exp_avg_sq != expected.exp_avg_sq ? 1 : 0;
    master_differs += fused.master != expected.master ? 1 : 0;
  }
  // The inputs can tell the two apart.
  EXPECT_GT(exp_avg_differs, 100);
  EXPECT_GT(exp_avg_sq_differs, 100);
  EXPECT_GT(master_differs, 100);
}

TEST(AdamElement, FirstStepMovesByTheLearningRateAgainstTheGradient) {
  const AdamCoefficients c = adam_coefficients({.weight_decay = 0.0}, 0.01, 1, 1.0f);
  EXPECT_NEAR(adam_element(c, {1.0f, 0.0f, 0.0f}, 3.0f).master, 0.99, 1e-6);
  EXPECT_NEAR(adam_element(c, {1.0f, 0.0f, 0.0f}, -1e-3f).master, 1.01, 1e-6);
  EXPECT_EQ(adam_element(c, {1.0f, 0.0f, 0.0f}, 0.0f).master, 1.0f);
}

TEST(AdamElement, DecayIsDecoupledFromTheGradient) {
  const AdamCoefficients c = adam_coefficients({.weight_decay = 0.5}, 0.1, 1, 1.0f);
  const AdamElement updated = adam_element(c, {2.0f, 0.0f, 0.0f}, 0.0f);
  EXPECT_EQ(updated.master, 2.0f * c.decay_factor);
  EXPECT_EQ(updated.exp_avg, 0.0f);
  EXPECT_EQ(updated.exp_avg_sq, 0.0f);
}

TEST(AdamElement, PassesNonFiniteGradientsOn) {
  const AdamCoefficients c = adam_coefficients({}, 1e-3, 1, 1.0f);
  EXPECT_TRUE(std::isnan(adam_element(c, {1.0f, 0.0f, 0.0f}, NAN).master));
  EXPECT_TRUE(std::isnan(adam_element(c, {1.0f, 0.0f, 0.0f}, INFINITY).master));
}

TEST(AdamCoefficients, AreTheFormulasRoundedOnce) {
  const AdamOptions options{.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  for (const std::uint64_t step : {1ull, 2ull, 3ull, 10ull, 1000ull, 123457ull}) {
    const AdamCoefficients c = adam_coefficients(options, 3e-4, step, 0.25f);
    const long double correction1 = 1 - std::pow(0.9L, static_cast<long double>(step));
    const long double correction2 = 1 - std::pow(0.95L, static_cast<long double>(step));
    EXPECT_EQ(c.gradient_scale, 0.25f);
    EXPECT_EQ(c.beta1, 0.9f);
    EXPECT_EQ(c.one_minus_beta1, static_cast<float>(1 - 0.9));
    EXPECT_EQ(c.beta2, 0.95f);
    EXPECT_EQ(c.one_minus_beta2, static_cast<float>(1 - 0.95));
    EXPECT_EQ(c.epsilon, 1e-8f);
    EXPECT_EQ(c.decay_factor, static_cast<float>(1 - 3e-4 * 0.1));
    EXPECT_FLOAT_EQ(c.step_size, static_cast<float>(3e-4L / correction1));
    EXPECT_FLOAT_EQ(c.inverse_sqrt_correction2, static_cast<float>(1 / std::sqrt(correction2)));
  }
}

TEST(AdamCoefficients, WithoutDecayTheFactorIsExactlyOne) {
  EXPECT_EQ(adam_coefficients({.weight_decay = 0.0}, 0.1, 7, 1.0f).decay_factor, 1.0f);
}

TEST(AdamCoefficients, CorrectionsVanishAfterVeryManySteps) {
  const AdamCoefficients c = adam_coefficients({}, 1e-3, std::uint64_t{1} << 62, 1.0f);
  EXPECT_EQ(c.step_size, 1e-3f);
  EXPECT_EQ(c.inverse_sqrt_correction2, 1.0f);
}

TEST(Power, EqualsRepeatedMultiplicationWhereThatIsExact) {
  EXPECT_EQ(power(0.0, 0), 1.0);
  EXPECT_EQ(power(0.0, 5), 0.0);
  for (std::uint64_t exponent = 0; exponent < 20; ++exponent) {
    EXPECT_EQ(power(3.0, exponent), std::round(std::pow(3.0L, static_cast<long double>(exponent))));
    EXPECT_EQ(power(0.5, exponent), std::ldexp(1.0, -static_cast<int>(exponent)));
  }
  EXPECT_NEAR(power(0.999, 10000), std::pow(0.999, 10000.0), 1e-16);
}

}  // namespace
}  // namespace sluice
