// How far the optimizers' fp32 weights are from the same formulas in fp64, over 1,000 steps of
// adversarial gradients, in units in the last place of the largest magnitude that the weight has
// had. Each rounding of the weight costs half a unit: one a step where decay is an L2 term, two
// where the weight is multiplied by 1 - learning_rate * weight_decay first. Whatever else is
// rounded adds less than one unit in all. Coefficients are the same in both, so that the bound is
// about the arithmetic and not about what fp32 makes of 0.999.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

constexpr std::uint64_t kSteps = 1000;
constexpr std::uint64_t kCount = 192;
constexpr double kRate = 1e-3;
constexpr double kDecay = 0.1;
constexpr float kScale = 0.37f;

struct Exact {
  double p = 0, m = 0, v = 0;
  double largest = 0;  // |p| so far
};

double ulp_of(double magnitude) {
  return std::ldexp(1.0, std::max(std::ilogb(magnitude), -126) - 23);
}

void adam_step(const AdamCoefficients& c, Exact& e, double g) {
  e.m = static_cast<double>(c.beta1) * e.m + static_cast<double>(c.one_minus_beta1) * g;
  e.v = static_cast<double>(c.beta2) * e.v + static_cast<double>(c.one_minus_beta2) * g * g;
  e.p = e.p * static_cast<double>(c.decay_factor) -
        static_cast<double>(c.step_size) * e.m /
            (std::sqrt(e.v) * static_cast<double>(c.inverse_sqrt_correction2) +
             static_cast<double>(c.epsilon));
}
void step(const AdamCoefficients& c, Exact& e, double gradient) {
  adam_step(c, e, gradient * static_cast<double>(c.gradient_scale));
}
void step(const AdamL2Coefficients& c, Exact& e, double gradient) {
  adam_step(
      c.adam, e,
      gradient * static_cast<double>(c.adam.gradient_scale) + static_cast<double>(c.l2) * e.p);
}
void step(const LionCoefficients& c, Exact& e, double gradient) {
  const double g = gradient * static_cast<double>(c.gradient_scale);
  const double direction =
      static_cast<double>(c.beta1) * e.m + static_cast<double>(c.one_minus_beta1) * g;
  e.m = static_cast<double>(c.beta2) * e.m + static_cast<double>(c.one_minus_beta2) * g;
  e.p = e.p * static_cast<double>(c.decay_factor) -
        static_cast<double>(c.learning_rate) * ((direction > 0) - (direction < 0));
}
void step(const AdagradCoefficients& c, Exact& e, double gradient) {
  const double g =
      gradient * static_cast<double>(c.gradient_scale) + static_cast<double>(c.l2) * e.p;
  e.v += g * g;
  e.p -= static_cast<double>(c.learning_rate) *
         (g / (std::sqrt(e.v) + static_cast<double>(c.epsilon)));
}
void step(const SgdCoefficients& c, Exact& e, double gradient) {
  const double g =
      gradient * static_cast<double>(c.gradient_scale) + static_cast<double>(c.l2) * e.p;
  e.m = static_cast<double>(c.momentum) * e.m + g;
  e.p -= static_cast<double>(c.learning_rate) * e.m;
}

// Runs both and expects them within `ulp_per_step` times the number of the step, plus 1.
template <class CoefficientsOf>
void expect_within(double ulp_per_step, const CoefficientsOf& coefficients_of_step) {
  OptimizerData data({.element_count = kCount, .seed = 12});
  std::vector<Exact> exact;
  for (std::uint64_t i = 0; i < kCount; ++i)
    exact.push_back({.p = data.master(i),
                     .m = data.exp_avg(i),
                     .v = data.exp_avg_sq(i),
                     .largest = std::fabs(data.master(i))});
  std::mt19937 random(13);
  double largest_ulp = 0;
  for (std::uint64_t number = 1; number <= kSteps; ++number) {
    const auto c = coefficients_of_step(number);
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const float gradient = adversarial_gradient(i, number, random);
      data.set_gradient(i, gradient);
      step(c, exact[i], gradient);
      exact[i].largest = std::max(exact[i].largest, std::fabs(exact[i].p));
    }
    update_simd(c, data.arrays());
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const double ulp = std::fabs(data.master(i) - exact[i].p) / ulp_of(exact[i].largest);
      ASSERT_LE(ulp, ulp_per_step * static_cast<double>(number) + 1) << i << " step " << number;
      largest_ulp = std::max(largest_ulp, ulp);
    }
  }
  EXPECT_GT(largest_ulp, 1) << "no rounding has been seen";
  ::testing::Test::RecordProperty("largest_ulp", fmt::format("{:.0f}", largest_ulp));
}

TEST(OptimizerUlp, AdamW) {
  expect_within(1.0, [](std::uint64_t number) {
    return adam_coefficients({.weight_decay = kDecay}, kRate, number, kScale);
  });
}

TEST(OptimizerUlp, AdamWithL2) {
  expect_within(0.5, [](std::uint64_t number) {
    return adam_l2_coefficients({.weight_decay = kDecay}, kRate, number, kScale);
  });
}

TEST(OptimizerUlp, Adagrad) {
  expect_within(0.5, [](std::uint64_t) {
    return adagrad_coefficients({.weight_decay = kDecay}, kRate, kScale);
  });
}

TEST(OptimizerUlp, Sgd) {
  expect_within(
      0.5, [](std::uint64_t) { return sgd_coefficients({.weight_decay = kDecay}, kRate, kScale); });
}

// Where exp_avg and gradient cancel to the last bit, fp32 and fp64 may see another sign; none of
// these gradients does that.
TEST(OptimizerUlp, Lion) {
  expect_within(1.0, [](std::uint64_t) {
    return lion_coefficients({.weight_decay = kDecay}, kRate, kScale);
  });
}

}  // namespace
}  // namespace sluice
