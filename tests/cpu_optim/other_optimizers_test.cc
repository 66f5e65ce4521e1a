// Lion, Adagrad, SGD and Adam with L2 against their papers' equations in fp64 over many steps, with
// a fixed bound on what fp32 rounding can have done; and a run that is cut and resumed.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

constexpr std::uint64_t kSteps = 1000;
constexpr std::uint64_t kCount = 192;
constexpr double kRate = 1e-3;
constexpr double kDecay = 0.1;
constexpr double kUnit = 0x1p-24;

// fp64 state of one element.
struct Exact {
  double p, m, v;
};

// Relative to the largest magnitudes met, each step adds a few roundings; the contraction of the
// moments keeps their share bounded.
double moment_bound(double largest, double beta) {
  return 8 * kUnit * largest / (1 - beta);
}

float gradient_of(std::uint64_t element, std::uint64_t step, std::mt19937& random) {
  const float magnitude = std::ldexp(1.0f, static_cast<int>(element / 4 % 16) - 12);
  switch (element % 4) {
    case 0: return step % 2 == 0 ? magnitude : -magnitude;
    case 1: return magnitude;
    case 2: return step % 100 == 0 ? magnitude : 0.0f;
    default: return magnitude * std::normal_distribution<float>()(random);
  }
}

// Runs `coefficients_of_step` over kSteps beside `exact_step`; returns the largest distance of a
// master, divided by 1 + its magnitude.
template <class CoefficientsOf, class ExactStep>
double largest_distance(const CoefficientsOf& coefficients_of_step, const ExactStep& exact_step) {
  OptimizerData data({.element_count = kCount, .seed = 8});
  std::vector<Exact> exact;
  for (std::uint64_t i = 0; i < kCount; ++i)
    exact.push_back({data.master(i), data.exp_avg(i), data.exp_avg_sq(i)});
  std::mt19937 random(9);
  double largest = 0;
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const float gradient = gradient_of(i, step, random);
      data.set_gradient(i, gradient);
      exact_step(exact[i], gradient, step);
    }
    update_simd(coefficients_of_step(step), data.arrays());
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const double distance = std::fabs(data.master(i) - exact[i].p) / (1 + std::fabs(exact[i].p));
      largest = std::max(largest, distance);
    }
  }
  return largest;
}

TEST(OtherOptimizers, SgdFollowsItsEquation) {
  const double distance = largest_distance(
      [](std::uint64_t) {
        return sgd_coefficients({.momentum = 0.9, .weight_decay = kDecay}, kRate, 0.5f);
      },
      [](Exact& e, double gradient, std::uint64_t) {
        const double g = gradient * 0.5 + static_cast<double>(static_cast<float>(kDecay)) * e.p;
        e.m = static_cast<double>(0.9f) * e.m + g;
        e.p -= static_cast<double>(static_cast<float>(kRate)) * e.m;
      });
  EXPECT_LE(distance, kSteps * 2 * kUnit);  // each step rounds the master once, and little besides
  EXPECT_GT(distance, 0);
}

TEST(OtherOptimizers, AdagradFollowsItsEquation) {
  const double distance = largest_distance(
      [](std::uint64_t) {
        return adagrad_coefficients({.epsilon = 1e-10, .weight_decay = kDecay}, kRate, 0.5f);
      },
      [](Exact& e, double gradient, std::uint64_t) {
        const double g = gradient * 0.5 + static_cast<double>(static_cast<float>(kDecay)) * e.p;
        e.v += g * g;
        e.p -= static_cast<double>(static_cast<float>(kRate)) * g / (std::sqrt(e.v) + 1e-10);
      });
  EXPECT_LE(distance, kSteps * 2 * kUnit);
  EXPECT_GT(distance, 0);
}

TEST(OtherOptimizers, AdamWithL2FollowsItsEquation) {
  const double distance = largest_distance(
      [](std::uint64_t step) {
        return adam_l2_coefficients({.beta1 = 0.9, .beta2 = 0.99, .weight_decay = kDecay}, kRate,
                                    step, 0.5f);
      },
      [](Exact& e, double gradient, std::uint64_t step) {
        const double beta1 = 0.9, beta2 = 0.99;
        const double g = gradient * 0.5 + kDecay * e.p;
        e.m = beta1 * e.m + (1 - beta1) * g;
        e.v = beta2 * e.v + (1 - beta2) * g * g;
        const double mean = e.m / (1 - std::pow(beta1, static_cast<double>(step)));
        const double square = e.v / (1 - std::pow(beta2, static_cast<double>(step)));
        e.p -= kRate * mean / (std::sqrt(square) + 1e-8);
      });
  // The fp32 betas differ from the decimal ones by up to 3e-8, which moves exp_avg_sq by 3e-6.
  EXPECT_LE(distance, kSteps * 8 * kUnit);
  EXPECT_GT(distance, 0);
}

// The sign of a sum near zero is decided by rounding, so Lion is compared step by step, from the
// same state, wherever the exact sum is clear of zero.
TEST(OtherOptimizers, LionFollowsItsEquation) {
  OptimizerData data({.element_count = kCount, .seed = 8});
  std::mt19937 random(9);
  std::uint64_t compared = 0;
  for (std::uint64_t step = 1; step <= kSteps; ++step) {
    std::vector<Exact> before;
    std::vector<double> gradients;
    for (std::uint64_t i = 0; i < kCount; ++i) {
      before.push_back({data.master(i), data.exp_avg(i), 0});
      gradients.push_back(gradient_of(i, step, random));
      data.set_gradient(i, static_cast<float>(gradients.back()));
    }
    update_simd(lion_coefficients({.weight_decay = kDecay}, kRate, 0.5f), data.arrays());
    for (std::uint64_t i = 0; i < kCount; ++i) {
      const double g = gradients[i] * 0.5;
      const double direction = 0.9 * before[i].m + 0.1 * g;
      const double m = 0.99 * before[i].m + 0.01 * g;
      const double size = std::fabs(before[i].m) + std::fabs(g);
      ASSERT_NEAR(data.exp_avg(i), m, moment_bound(size, 0.9)) << i << " step " << step;
      if (std::fabs(direction) < 1e-5 * size) continue;
      const double p = before[i].p * (1 - kRate * kDecay) - std::copysign(kRate, direction);
      ASSERT_NEAR(data.master(i), p, 4 * kUnit * (std::fabs(p) + kRate)) << i << " step " << step;
      ++compared;
    }
  }
  EXPECT_GT(compared, kSteps * kCount * 9 / 10);
}

TEST(OtherOptimizers, LionStandsStillWithoutADirection) {
  const LionCoefficients c = lion_coefficients({.weight_decay = 0.0}, 0.5, 1.0f);
  EXPECT_EQ(lion_element(c, {2.0f, 0.0f, 0.0f}, 0.0f).master, 2.0f);
  EXPECT_EQ(lion_element(c, {2.0f, 0.0f, 0.0f}, 1e-30f).master, 1.5f);
  EXPECT_EQ(lion_element(c, {2.0f, 0.0f, 0.0f}, -1e-30f).master, 2.5f);
  EXPECT_TRUE(std::isnan(lion_element(c, {2.0f, 0.0f, 0.0f}, NAN).master));
}

// Nothing but the state and the step's number is carried from one step to the next.
TEST(OtherOptimizers, AResumedRunGivesTheBitsOfOneThatNeverStopped) {
  for (std::size_t kind = 0; kind < all_test_coefficients().size(); ++kind) {
    const auto run = [&](OptimizerData& data, std::uint64_t begin, std::uint64_t end) {
      for (std::uint64_t step = begin; step < end; ++step) {
        UpdateCoefficients c = all_test_coefficients()[kind];
        if (kind == 0) c = adam_coefficients({}, 1e-3, step, 0.5f);
        if (kind == 1) c = adam_l2_coefficients({}, 1e-3, step, 0.5f);
        std::mt19937 random(static_cast<std::uint32_t>(step));
        for (std::uint64_t i = 0; i < kCount; ++i)
          data.set_gradient(i, gradient_of(i, step, random));
        update_simd(c, data.arrays());
      }
    };
    OptimizerData whole({.master_layout = MasterLayout::kSplitBf16, .element_count = kCount});
    OptimizerData saved = whole;
    run(whole, 1, 60);
    run(saved, 1, 23);
    OptimizerData resumed = saved;
    run(resumed, 23, 60);
    EXPECT_EQ(resumed.difference(whole), "") << kind;
  }
}

}  // namespace
}  // namespace sluice
