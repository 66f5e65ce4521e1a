// The scalar definition against the same formulas in fp64, with a running error bound: beside each
// fp64 value the oracle carries the largest distance that fp32 rounding can have caused so far, one
// unit roundoff u = 2^-24 per operation plus half the smallest denormal where one may underflow.
// Every step of every element has to stay within it.
#include <algorithm>

#include <gtest/gtest.h>

#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

constexpr std::uint64_t kSteps = 1000;
constexpr double kLearningRate = 1e-3;

struct Oracle {
  double master = 0, exp_avg = 0, exp_avg_sq = 0;
  double master_error = 0, exp_avg_error = 0, exp_avg_sq_error = 0;

  void step(const AdamCoefficients& c, double gradient) {
    constexpr double u = 0x1p-24;
    constexpr double eta = 0x1p-150;
    constexpr double slack = 1 + 1e-6;  // products of two errors, and the oracle's own rounding
    const double beta1 = c.beta1, rest1 = c.one_minus_beta1;
    const double beta2 = c.beta2, rest2 = c.one_minus_beta2;

    const double g = gradient * c.gradient_scale;
    const double g_error = u * std::fabs(g) + eta;
    const double m = beta1 * exp_avg + rest1 * g;
    const double m_error = beta1 * exp_avg_error +
                           u * beta1 * (std::fabs(exp_avg) + exp_avg_error) +
                           rest1 * (g_error + u * std::fabs(g)) + u * std::fabs(m) + 2 * eta;
    const double v = beta2 * exp_avg_sq + rest2 * g * g;
    const double v_error = beta2 * exp_avg_sq_error + u * beta2 * (exp_avg_sq + exp_avg_sq_error) +
                           2 * rest2 * std::fabs(g) * (g_error + u * std::fabs(g)) +
                           eta * std::fabs(g) + u * v + 2 * eta;
    const double root = std::sqrt(v);
    const double root_error =
        std::min(v > 0 ? v_error / root : HUGE_VAL, std::sqrt(v_error)) * (1 + u) + u * root;
    const double denominator = root * c.inverse_sqrt_correction2 + c.epsilon;
    const double denominator_error =
        c.inverse_sqrt_correction2 * (root_error + u * root) + u * denominator + 2 * eta;
    const double denominator_min =
        std::max(denominator - denominator_error, c.epsilon * (1 - 2 * u));
    const double ratio = m / denominator;
    const double ratio_error =
        (m_error + std::fabs(ratio) * denominator_error) / denominator_min * (1 + u) +
        u * std::fabs(ratio) + eta;
    const double kept = master * c.decay_factor;
    const double updated = kept - c.step_size * ratio;
    master_error = slack * (c.decay_factor * master_error + u * (std::fabs(kept) + master_error) +
                            c.step_size * (ratio_error + u * std::fabs(ratio)) +
                            u * std::fabs(updated) + 3 * eta);
    exp_avg_error = slack * m_error;
    exp_avg_sq_error = slack * v_error;
    master = updated;
    exp_avg = m;
    exp_avg_sq = v;
  }
};

template <class GradientOf>
double run_against_oracle(std::uint64_t element_count, const GradientOf& gradient_of) {
  OptimizerData data({.element_count = element_count});
  std::vector<Oracle> oracle(element_count);
  for (std::uint64_t i = 0; i < element_count; ++i) {
    oracle[i].master = data.master(i);
    oracle[i].exp_avg = data.exp_avg(i);
    oracle[i].exp_avg_sq = data.exp_avg_sq(i);
  }
  double bound_max = 0;
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    const AdamCoefficients c = adam_coefficients({.weight_decay = 0.1}, kLearningRate, step, 0.37f);
    for (std::uint64_t i = 0; i < element_count; ++i) {
      const float gradient = gradient_of(i, step);
      data.set_gradient(i, gradient);
      oracle[i].step(c, gradient);
    }
    update_simd(c, data.arrays());
    for (std::uint64_t i = 0; i < element_count; ++i) {
      const Oracle& o = oracle[i];
      EXPECT_LE(std::fabs(data.master(i) - o.master), o.master_error) << i << " step " << step;
      EXPECT_LE(std::fabs(data.exp_avg(i) - o.exp_avg), o.exp_avg_error) << i << " step " << step;
      EXPECT_LE(std::fabs(data.exp_avg_sq(i) - o.exp_avg_sq), o.exp_avg_sq_error)
          << i << " step " << step;
      if (::testing::Test::HasFailure()) return HUGE_VAL;
      bound_max = std::max(bound_max, o.master_error);
    }
  }
  return bound_max;
}

TEST(AdamOracle, RandomGradientsStayWithinTheBound) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const double bound =
      run_against_oracle(256, [&](std::uint64_t, std::uint64_t) { return 0.02f * normal(random); });
  EXPECT_LE(bound, kLearningRate / 10) << "a bound above a tenth of one update proves little";
}

TEST(AdamOracle, AdversarialGradientsStayWithinTheBound) {
  std::mt19937 random(4);
  const double bound = run_against_oracle(192, [&](std::uint64_t element, std::uint64_t step) {
    return adversarial_gradient(element, step, random);
  });
  EXPECT_LE(bound, kLearningRate) << "a bound above one update proves little";
}

// The textbook form of the first step, worked out by hand: exp_avg / (1 - beta1) is the gradient
// and the root of exp_avg_sq / (1 - beta2) its magnitude, so the update is the learning rate.
TEST(AdamOracle, FirstStepMovesByTheLearningRate) {
  float parameter[] = {1.0f, 1.0f};
  float exp_avg[] = {0.0f, 0.0f};
  float exp_avg_sq[] = {0.0f, 0.0f};
  const float gradient[] = {0.25f, -1e-3f};
  update_simd(adam_coefficients({.weight_decay = 0.0}, 0.125, 1, 1.0f), {.parameter = parameter,
                                                                         .exp_avg = exp_avg,
                                                                         .exp_avg_sq = exp_avg_sq,
                                                                         .gradient = gradient,
                                                                         .element_count = 2});
  EXPECT_NEAR(parameter[0], 0.875, 1e-6);
  EXPECT_NEAR(parameter[1], 1.125, 2e-6);  // epsilon / 1e-3 = 1e-5 of the update
  EXPECT_NEAR(exp_avg[0], 0.025, 1e-8);
  EXPECT_NEAR(exp_avg_sq[0], 6.25e-5, 1e-11);
}

TEST(AdamOracle, SplitMasterFollowsFp32MasterBitForBit) {
  constexpr std::uint64_t kCount = 1021;
  OptimizerData fp32({.element_count = kCount, .seed = 5});
  OptimizerData split(
      {.master_layout = MasterLayout::kSplitBf16, .element_count = kCount, .seed = 5});
  std::mt19937 random(6);
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    const AdamCoefficients c = adam_coefficients({}, kLearningRate, step, 1.0f);
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const float gradient = adversarial_gradient(i, step, random);
      fp32.set_gradient(i, gradient);
      split.set_gradient(i, gradient);
    }
    update_simd(c, fp32.arrays());
    update_simd(c, split.arrays());
    for (std::uint64_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(bits_from_float(fp32.master(i)), bits_from_float(split.master(i)))
          << i << " step " << step;
    }
  }
}

}  // namespace
}  // namespace sluice
