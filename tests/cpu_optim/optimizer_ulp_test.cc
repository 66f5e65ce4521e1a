// How far the optimizers' fp32 weights are from the same formulas in fp64: every element of every
// step stays within the running error bound (optimizer_error_bound.h), with ordinary gradients and
// with adversarial ones, and AdamW within the closed form that docs/architecture.md states.
#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

#include <gtest/gtest.h>

#include "tests/cpu_optim/optimizer_data.h"
#include "tests/cpu_optim/optimizer_error_bound.h"

namespace sluice {
namespace {

constexpr double kRate = 1e-3;
constexpr double kDecay = 0.1;
constexpr float kScale = 0.37f;

double ulp_of(double magnitude) {
  return std::ldexp(1.0, std::max(std::ilogb(magnitude), -126) - 23);
}

struct Gradients {
  const char* name;
  std::uint64_t count;
  std::uint64_t steps;
  // Where weights begin; none = as OptimizerData has them, moments too.
  std::optional<float> spread;
  bool is_adversarial;
};

// Normal gradients of 0.01, as training has them; biases start at 0, matrices at N(0, 0.02).
constexpr Gradients kGradients[] = {{"biases", 2048, 40, 0.0f, false},
                                    {"matrices", 2048, 40, 0.02f, false},
                                    {"adversarial", 192, 1000, std::nullopt, true}};

class OptimizerUlp : public testing::TestWithParam<Gradients> {
 protected:
  // Figures over all elements and steps.
  struct Seen {
    double largest_ulp = 0;
    std::uint64_t beyond_rounding = 0;  // farther off than roundings of the weight alone explain
    std::uint64_t compared = 0;
    std::uint64_t unbounded = 0;  // a division by what may be 0, or by error alone
  };

  template <class CoefficientsOf>
  Seen run(double roundings_per_step, const CoefficientsOf& coefficients_of_step) const {
    const Gradients& gradients = GetParam();
    std::mt19937 random(13);
    std::normal_distribution<float> normal;
    OptimizerData data({.element_count = gradients.count, .seed = 12});
    std::vector<BoundedElement> elements(gradients.count);
    for (std::uint64_t i = 0; i < gradients.count; ++i) {
      if (gradients.spread) {
        data.set_master(i, *gradients.spread * normal(random));
        data.set_moments(i, 0, 0);
      }
      elements[i] = {.p = {data.master(i)}, .m = {data.exp_avg(i)}, .v = {data.exp_avg_sq(i)}};
      elements[i].absolute_m = std::fabs(data.exp_avg(i));
      elements[i].note_weight();
    }
    Seen seen;
    for (std::uint64_t number = 1; number <= gradients.steps; ++number) {
      const auto c = coefficients_of_step(number);
      for (std::uint64_t i = 0; i < gradients.count; ++i) {
        const float gradient = gradients.is_adversarial ? adversarial_gradient(i, number, random)
                                                        : 0.01f * normal(random);
        data.set_gradient(i, gradient);
        bounded_step(c, elements[i], gradient, static_cast<double>(number));
      }
      update_simd(c, data.arrays());
      for (std::uint64_t i = 0; i < gradients.count; ++i) {
        const BoundedElement& e = elements[i];
        const double off = std::fabs(data.master(i) - e.p.value);
        const double ulp = ulp_of(e.largest);
        EXPECT_LE(off, e.p.error) << gradients.name << " " << i << " step " << number;
        ++seen.compared;
        seen.unbounded += std::isfinite(e.p.error) ? 0 : 1;
        seen.beyond_rounding +=
            off > (roundings_per_step * 0.5 * static_cast<double>(number) + 1) * ulp ? 1 : 0;
        seen.largest_ulp = std::max(seen.largest_ulp, off / ulp);
        // Half a unit for each rounding of the weight, and what is rounded inside the update.
        if constexpr (std::is_same_v<decltype(c), const AdamCoefficients>) {
          EXPECT_LE(off, (e.weight_roundings + e.updates / e.largest) * ulp + kTiny)
              << gradients.name << " " << i << " step " << number;
        }
        if (HasFailure()) return seen;
      }
    }
    EXPECT_GT(seen.largest_ulp, 1) << "no rounding has been seen";
    EXPECT_LT(10 * seen.unbounded, seen.compared) << "the bound says nothing";
    RecordProperty("largest_ulp", fmt::format("{:.2f}", seen.largest_ulp));
    return seen;
  }

  // exp_avg of gradients below 2^-126 has an error of its own.
  static constexpr double kTiny = 1e-30;
};

TEST_P(OptimizerUlp, AdamW) {
  const Seen seen = run(2, [](std::uint64_t number) {
    return adam_coefficients({.weight_decay = kDecay}, kRate, number, kScale);
  });
  // A weight that starts at 0 is no larger than its first updates, so their roundings count.
  if (GetParam().spread == 0.0f) {
    EXPECT_GT(seen.beyond_rounding, 0u);
  }
}

TEST_P(OptimizerUlp, AdamWithL2) {
  (void)run(1, [](std::uint64_t number) {
    return adam_l2_coefficients({.weight_decay = kDecay}, kRate, number, kScale);
  });
}

TEST_P(OptimizerUlp, Adagrad) {
  (void)run(1, [](std::uint64_t) {
    return adagrad_coefficients({.weight_decay = kDecay}, kRate, kScale);
  });
}

TEST_P(OptimizerUlp, Sgd) {
  (void)run(
      1, [](std::uint64_t) { return sgd_coefficients({.weight_decay = kDecay}, kRate, kScale); });
}

// Where exp_avg and gradient cancel to the last bit, fp32 and fp64 may see another sign.
TEST_P(OptimizerUlp, Lion) {
  (void)run(
      2, [](std::uint64_t) { return lion_coefficients({.weight_decay = kDecay}, kRate, kScale); });
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerUlp, testing::ValuesIn(kGradients),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace sluice
