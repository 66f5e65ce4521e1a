// A caller that flushes denormals or rounds another way changes no result, and finds its setting
// unchanged afterwards.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu_optim/cpu_optimizer.h"
#include "tests/cpu_optim/optimizer_data.h"
#include "tests/support/hostile_environment.h"

#if defined(__x86_64__) || defined(__aarch64__)

namespace sluice {
namespace {

using test::kHostile;
using test::run_under;

// Gradients and moments around 2^-130: everything that matters is denormal.
OptimizerData denormal_data(MasterLayout layout) {
  OptimizerData data({.master_layout = layout, .element_count = 1001, .values = Values::kAny});
  for (std::uint64_t i = 0; i < 1001; ++i)
    data.set_gradient(i, std::ldexp(1.0f + static_cast<float>(i) / 1001.0f, -130));
  return data;
}

TEST(FloatEnvironment, AdamIgnoresTheCallers) {
  const auto coefficients = test_coefficients();  // not under a caller's setting
  for (const MasterLayout layout : {MasterLayout::kFp32, MasterLayout::kSplitBf16}) {
    const OptimizerData start = denormal_data(layout);
    OptimizerData expected = start;
    update_reference(coefficients, expected.arrays());
    for (const unsigned hostile : kHostile) {
      OptimizerData reference = start;
      OptimizerData simd = start;
      OptimizerData threaded = start;
      EXPECT_EQ(run_under(hostile,
                          [&] {
                            update_reference(coefficients, reference.arrays());
                            update_simd(coefficients, simd.arrays());
                            CpuOptimizer(2).update(coefficients, threaded.arrays());
                          }),
                hostile);
      EXPECT_EQ(reference.difference(expected), "");
      EXPECT_EQ(simd.difference(expected), "");
      EXPECT_EQ(threaded.difference(expected), "");
    }
  }
}

TEST(FloatEnvironment, GradientOperationsIgnoreTheCallers) {
  constexpr std::uint64_t kCount = 999;
  std::vector<float> start(kCount);
  std::vector<float> source(kCount);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    start[i] = std::ldexp(static_cast<float>(i), -140);
    source[i] = std::ldexp(0.1f * static_cast<float>(i), -141);
  }
  std::vector<float> expected = start;
  accumulate_gradient_reference(DType::kFp32, expected.data(), source.data(), kCount);
  NormAccumulator expected_norm;
  add_squared_norm_reference(DType::kFp32, expected.data(), kCount, expected_norm);
  for (const unsigned hostile : kHostile) {
    std::vector<float> actual = start;
    std::vector<float> reference = start;
    NormAccumulator norm;
    NormAccumulator reference_norm;
    EXPECT_EQ(run_under(hostile,
                        [&] {
                          accumulate_gradient(DType::kFp32, actual.data(), source.data(), kCount);
                          accumulate_gradient_reference(DType::kFp32, reference.data(),
                                                        source.data(), kCount);
                          add_squared_norm(DType::kFp32, actual.data(), kCount, norm);
                          add_squared_norm_reference(DType::kFp32, reference.data(), kCount,
                                                     reference_norm);
                        }),
              hostile);
    EXPECT_EQ(actual, expected);
    EXPECT_EQ(reference, expected);
    EXPECT_EQ(norm.sum_of_squares(), expected_norm.sum_of_squares());
    EXPECT_EQ(reference_norm.sum_of_squares(), expected_norm.sum_of_squares());
  }
}

}  // namespace
}  // namespace sluice

#else

TEST(FloatEnvironment, IsOfKnownProcessors) {
  GTEST_SKIP() << "the floating-point environment is set on x86-64 and aarch64 only";
}

#endif
