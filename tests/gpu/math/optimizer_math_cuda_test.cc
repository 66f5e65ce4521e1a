// The GPU computes the bits that the CPU computes: every conversion and every optimizer's update,
// element for element.
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "tests/gpu/math/optimizer_math_kernels.h"

namespace sluice::test {
namespace {

class OptimizerMathCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_gpu(); !why.empty()) GTEST_SKIP() << why;
  }
};

std::vector<std::uint16_t> all_16_bit_patterns() {
  std::vector<std::uint16_t> values(1 << 16);
  for (std::uint32_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i);
  return values;
}

// 4.4 million fp32 patterns over the whole range, and those on either side of each place where the
// conversions change their way: ties, the least normal, the greatest finite, infinity and NaN.
std::vector<std::uint32_t> fp32_patterns() {
  std::vector<std::uint32_t> bits;
  for (std::uint64_t i = 0; i <= UINT32_MAX; i += 977)
    bits.push_back(static_cast<std::uint32_t>(i));
  for (const std::uint32_t center :
       {0x0u, 0x800000u, 0x33000000u, 0x33800000u, 0x38800000u, 0x3f800000u, 0x3f808000u,
        0x3f818000u, 0x477ff000u, 0x47800000u, 0x7f7f8000u, 0x7f800000u, 0x7fc00000u}) {
    for (std::uint32_t offset = 0; offset < 8; ++offset) {
      for (const std::uint32_t sign : {0x0u, 0x80000000u})
        bits.push_back((center + offset - 4) ^ sign);
    }
  }
  return bits;
}

TEST_F(OptimizerMathCuda, WidensEveryBf16) {
  const std::vector<std::uint16_t> values = all_16_bit_patterns();
  const std::vector<std::uint32_t> actual = gpu_float_bits_from_bf16(values);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(actual[i], bits_from_float(float_from_bf16(values[i]))) << std::hex << values[i];
}

TEST_F(OptimizerMathCuda, WidensEveryFp16) {
  const std::vector<std::uint16_t> values = all_16_bit_patterns();
  const std::vector<std::uint32_t> actual = gpu_float_bits_from_fp16(values);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(actual[i], bits_from_float(float_from_fp16(values[i]))) << std::hex << values[i];
}

TEST_F(OptimizerMathCuda, RoundsToBf16AndFp16) {
  const std::vector<std::uint32_t> bits = fp32_patterns();
  const std::vector<std::uint16_t> bf16 = gpu_bf16_from_float_bits(bits);
  const std::vector<std::uint16_t> fp16 = gpu_fp16_from_float_bits(bits);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    ASSERT_EQ(bf16[i], bf16_from_float(float_from_bits(bits[i]))) << std::hex << bits[i];
    ASSERT_EQ(fp16[i], fp16_from_float(float_from_bits(bits[i]))) << std::hex << bits[i];
  }
}

TEST_F(OptimizerMathCuda, SplitsAndJoinsMasters) {
  const std::vector<std::uint32_t> bits = fp32_patterns();
  const std::vector<SplitMaster> splits = gpu_split_master(bits);
  const std::vector<std::uint32_t> joined = gpu_join_master(splits);
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const SplitMaster expected = split_master(float_from_bits(bits[i]));
    ASSERT_EQ(splits[i].high, expected.high) << std::hex << bits[i];
    ASSERT_EQ(splits[i].low, expected.low) << std::hex << bits[i];
    ASSERT_EQ(joined[i], bits_from_float(join_master(expected))) << std::hex << bits[i];
  }
}

AdamElement element(const AdamCoefficients& c, AdamElement state, float gradient) {
  return adam_element(c, state, gradient);
}
AdamElement element(const AdamL2Coefficients& c, AdamElement state, float gradient) {
  return adam_l2_element(c, state, gradient);
}
AdamElement element(const LionCoefficients& c, AdamElement state, float gradient) {
  return lion_element(c, state, gradient);
}
AdamElement element(const AdagradCoefficients& c, AdamElement state, float gradient) {
  return adagrad_element(c, state, gradient);
}
AdamElement element(const SgdCoefficients& c, AdamElement state, float gradient) {
  return sgd_element(c, state, gradient);
}

// Every optimizer; Adam at several steps, the only one whose numbers depend on them.
std::vector<ElementCoefficients> all_coefficients() {
  std::vector<ElementCoefficients> all = {lion_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f),
                                          adagrad_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f),
                                          sgd_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f)};
  for (const std::uint64_t step : {1u, 2u, 1000u}) {
    all.emplace_back(adam_coefficients({.weight_decay = 0.1}, 1e-3, step, 0.37f));
    all.emplace_back(adam_l2_coefficients({.weight_decay = 0.1}, 1e-3, step, 0.37f));
  }
  return all;
}

// Magnitudes from the subnormals to 2^40, so that sums cancel, products underflow and quotients
// grow large.
TEST_F(OptimizerMathCuda, UpdatesElementsAsTheCpu) {
  std::mt19937 random(1);
  const auto value = [&random](int exponent_min, int exponent_max) {
    std::uniform_int_distribution<int> exponent(exponent_min, exponent_max);
    std::uniform_real_distribution<float> mantissa(-2.0f, 2.0f);
    return std::ldexp(mantissa(random), exponent(random));
  };
  std::vector<AdamInput> inputs(1 << 20);
  for (AdamInput& input : inputs) {
    input.state = {.master = value(-149, 40),
                   .exp_avg = value(-149, 40),
                   .exp_avg_sq = std::fabs(value(-149, 80))};
    input.gradient = value(-149, 40);
  }
  inputs.front() = {};  // 0 / (0 + epsilon)
  for (const ElementCoefficients& coefficients : all_coefficients()) {
    const std::vector<AdamElement> actual = gpu_update_elements(coefficients, inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const AdamElement expected =
          std::visit([&](const auto& c) { return element(c, inputs[i].state, inputs[i].gradient); },
                     coefficients);
      const auto same = [](float a, float b) {
        return bits_from_float(a) == bits_from_float(b) || (std::isnan(a) && std::isnan(b));
      };
      ASSERT_TRUE(same(actual[i].master, expected.master)) << i << " " << coefficients.index();
      ASSERT_TRUE(same(actual[i].exp_avg, expected.exp_avg)) << i << " " << coefficients.index();
      ASSERT_TRUE(same(actual[i].exp_avg_sq, expected.exp_avg_sq))
          << i << " " << coefficients.index();
    }
  }
}

}  // namespace
}  // namespace sluice::test
