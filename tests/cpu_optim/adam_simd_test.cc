// Every instruction set that this processor has gives the bits of the scalar definition.
#include <gtest/gtest.h>

#include "cpu_optim/simd_kernels.h"
#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

constexpr MasterLayout kLayouts[] = {MasterLayout::kFp32, MasterLayout::kSplitBf16};
constexpr DType kDtypes[] = {DType::kFp32, DType::kBf16};

void expect_equal(const SimdKernels& kernels, const OptimizerData::Options& options) {
  const OptimizerData start(options);
  const AdamCoefficients coefficients = test_coefficients();
  OptimizerData expected = start;
  adam_reference(coefficients, expected.arrays());
  OptimizerData actual = start;
  EXPECT_EQ(kernels.adam(coefficients, actual.arrays()), kernels.target_name);
  ASSERT_EQ(actual.difference(expected), "")
      << kernels.target_name << ", layout " << static_cast<int>(options.master_layout)
      << ", gradient " << name_of(options.gradient_dtype) << ", offset " << options.offset_elements
      << ", seed " << options.seed;
  if (options.element_count > 0) {
    EXPECT_NE(actual.difference(start), "") << "the update did nothing";
  }
}

TEST(AdamSimd, EqualsReferenceAtEveryLength) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const MasterLayout layout : kLayouts) {
      for (const DType dtype : kDtypes) {
        for (std::uint64_t count = 0; count <= 300; ++count) {
          expect_equal(kernels, {.master_layout = layout,
                                 .gradient_dtype = dtype,
                                 .element_count = count,
                                 .offset_elements = count % 5,
                                 .seed = static_cast<std::uint32_t>(count)});
        }
      }
    }
  }
}

TEST(AdamSimd, EqualsReferenceOnSpecialValuesAtEveryOffset) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const MasterLayout layout : kLayouts) {
      for (const DType dtype : kDtypes) {
        for (std::uint64_t offset = 0; offset <= 16; ++offset) {
          expect_equal(kernels, {.master_layout = layout,
                                 .gradient_dtype = dtype,
                                 .element_count = 4099,
                                 .offset_elements = offset,
                                 .values = Values::kAny,
                                 .seed = static_cast<std::uint32_t>(offset)});
        }
      }
    }
  }
}

TEST(AdamSimd, EqualsReferenceOnLargeArrays) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const MasterLayout layout : kLayouts) {
      expect_equal(kernels,
                   {.master_layout = layout, .element_count = 1'000'003, .offset_elements = 3});
    }
  }
}

// The halves are cut and joined in vectors for all 2^32 masters alike: here every bf16 value with
// the remainders around zero, around the tie and at the ends. A zero step size leaves the master
// as it is.
TEST(AdamSimd, SplitMasterComesBackForEveryHighHalf) {
  AdamCoefficients keep = test_coefficients();
  keep.decay_factor = 1.0f;
  keep.step_size = 0.0f;
  constexpr std::uint16_t kLows[] = {0, 1, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
  std::vector<std::uint32_t> masters;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint16_t low : kLows) masters.push_back(high << 16 | low);
  }
  std::vector<float> moments(masters.size(), 1.0f);
  std::vector<float> squares(masters.size(), 1.0f);
  const std::vector<float> gradient(masters.size(), 1.0f);
  for (const SimdKernels& kernels : available_simd_kernels()) {
    std::vector<std::uint16_t> high;
    std::vector<std::int16_t> low;
    for (const std::uint32_t master : masters) {
      const SplitMaster halves = split_master(float_from_bits(master));
      high.push_back(halves.high);
      low.push_back(halves.low);
    }
    kernels.adam(keep, {.master_layout = MasterLayout::kSplitBf16,
                        .parameter = high.data(),
                        .low = low.data(),
                        .exp_avg = moments.data(),
                        .exp_avg_sq = squares.data(),
                        .gradient = gradient.data(),
                        .element_count = masters.size()});
    for (std::size_t i = 0; i < masters.size(); ++i) {
      const float before = float_from_bits(masters[i]);
      const SplitMaster expected = split_master(before);
      const bool nan_again = std::isnan(before) && std::isnan(join_master({high[i], low[i]})) &&
                             std::isnan(float_from_bf16(high[i]));
      ASSERT_TRUE(nan_again || (high[i] == expected.high && low[i] == expected.low))
          << kernels.target_name << fmt::format(" {:08x}", masters[i]);
    }
  }
}

TEST(AdamSimd, CutsChangeNothing) {
  for (const MasterLayout layout : kLayouts) {
    const OptimizerData start(
        {.master_layout = layout, .element_count = 10'007, .offset_elements = 1, .seed = 7});
    OptimizerData whole = start;
    adam_simd(test_coefficients(), whole.arrays());
    OptimizerData pieces = start;
    std::mt19937 random(11);
    for (std::uint64_t begin = 0; begin < 10'007;) {
      const std::uint64_t count = std::min<std::uint64_t>(random() % 200, 10'007 - begin);
      adam_simd(test_coefficients(), slice(pieces.arrays(), begin, count));
      begin += count;
    }
    EXPECT_EQ(pieces.difference(whole), "");
  }
}

using AdamDeathTest = ::testing::Test;

TEST(AdamDeathTest, RefusesArraysThatItsContractForbids) {
  OptimizerData data({.element_count = 4});
  AdamArrays arrays = data.arrays();
  arrays.gradient_dtype = DType::kFp16;
  EXPECT_DEATH(adam_simd(test_coefficients(), arrays), "fp32 or bf16");
  arrays = data.arrays();
  arrays.master_layout = MasterLayout::kSplitBf16;
  EXPECT_DEATH(adam_simd(test_coefficients(), arrays), "split master");
  EXPECT_DEATH(slice(data.arrays(), 2, 3), "inside its arrays");
}

}  // namespace
}  // namespace sluice
