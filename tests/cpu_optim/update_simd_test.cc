// Every instruction set that this processor has gives the bits of the scalar definition, for every
// optimizer, master layout and gradient type.
#include <gtest/gtest.h>

#include "cpu_optim/optimizer_options.h"
#include "cpu_optim/simd_kernels.h"
#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

constexpr DType kDtypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};

void expect_equal(const SimdKernels& kernels, const UpdateCoefficients& coefficients,
                  OptimizerData::Options options) {
  options.keeps_exp_avg = keeps_exp_avg(coefficients);
  options.keeps_exp_avg_sq = keeps_exp_avg_sq(coefficients);
  const OptimizerData start(options);
  OptimizerData expected = start;
  const NewState state = update_reference(coefficients, expected.arrays());
  OptimizerData actual = start;
  const VectorResult result = kernels.update(coefficients, actual.arrays());
  EXPECT_EQ(result.target_name, kernels.target_name);
  EXPECT_EQ(result.state, state);
  ASSERT_EQ(actual.difference(expected), "")
      << kernels.target_name << ", optimizer " << coefficients.index() << ", layout "
      << static_cast<int>(options.master_layout) << ", gradient " << name_of(options.gradient_dtype)
      << ", offset " << options.offset_elements << ", seed " << options.seed;
  if (options.element_count > 0) {
    EXPECT_NE(actual.difference(start), "") << "the update did nothing";
  }
}

// Calls expect_equal() for every kernel, optimizer, layout and gradient type.
void expect_all_equal(const OptimizerData::Options& common) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const UpdateCoefficients& coefficients : all_test_coefficients()) {
      for (const MasterLayout layout : kMasterLayouts) {
        for (const DType dtype : kDtypes) {
          OptimizerData::Options options = common;
          options.master_layout = layout;
          options.gradient_dtype = dtype;
          ASSERT_NO_FATAL_FAILURE(expect_equal(kernels, coefficients, options));
        }
      }
    }
  }
}

TEST(UpdateSimd, EqualsReferenceAtEveryLength) {
  for (std::uint64_t count = 0; count <= 130; ++count) {
    ASSERT_NO_FATAL_FAILURE(expect_all_equal({.element_count = count,
                                              .offset_elements = count % 5,
                                              .seed = static_cast<std::uint32_t>(count)}));
  }
}

TEST(UpdateSimd, EqualsReferenceOnSpecialValuesAtEveryOffset) {
  for (std::uint64_t offset = 0; offset <= 16; ++offset) {
    ASSERT_NO_FATAL_FAILURE(expect_all_equal({.element_count = 1031,
                                              .offset_elements = offset,
                                              .values = Values::kAny,
                                              .seed = static_cast<std::uint32_t>(offset)}));
  }
}

TEST(AdamSimd, EqualsReferenceOnLargeArrays) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const MasterLayout layout : kMasterLayouts) {
      expect_equal(kernels, test_coefficients(),
                   {.master_layout = layout, .element_count = 300'003, .offset_elements = 3});
    }
  }
}

// Every fp16 gradient, taken in by SGD without decay or momentum, comes out as the scaled value.
TEST(UpdateSimd, EveryFp16GradientIsRead) {
  const SgdCoefficients coefficients =
      sgd_coefficients({.momentum = 0.0, .weight_decay = 0.0}, -1.0, 1.0f);
  std::vector<std::uint16_t> gradient(0x10000);
  for (std::uint32_t i = 0; i < gradient.size(); ++i) gradient[i] = static_cast<std::uint16_t>(i);
  for (const SimdKernels& kernels : available_simd_kernels()) {
    std::vector<float> parameter(gradient.size(), 0.0f);
    std::vector<float> momentum(gradient.size(), 0.0f);
    kernels.update(coefficients, {.gradient_dtype = DType::kFp16,
                                  .parameter = parameter.data(),
                                  .exp_avg = momentum.data(),
                                  .gradient = gradient.data(),
                                  .element_count = gradient.size()});
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const float value = float_from_fp16(gradient[i]) + 0.0f;
      ASSERT_TRUE(OptimizerData::same(parameter[i], value)) << kernels.target_name << " " << i;
    }
  }
}

// SGD without momentum neither reads, changes nor judges the average, in vectors and in the scalar
// rest.
TEST(UpdateSimd, SgdWithoutMomentumLeavesTheAverageAlone) {
  const SgdCoefficients coefficients =
      sgd_coefficients({.momentum = 0.0, .weight_decay = 0.0}, 1.0, 1.0f);
  for (const SimdKernels& kernels : available_simd_kernels()) {
    std::vector<float> parameter(97, 3.0f);
    std::vector<float> momentum(97, INFINITY);
    momentum[5] = -7.0f;
    const std::vector<float> expected = momentum, gradient(97, 1.0f);
    const UpdateArrays arrays{.parameter = parameter.data(),
                              .exp_avg = momentum.data(),
                              .gradient = gradient.data(),
                              .element_count = gradient.size()};
    EXPECT_EQ(kernels.update(coefficients, arrays).state, NewState::kFinite);
    EXPECT_EQ(parameter, std::vector<float>(97, 2.0f)) << kernels.target_name;
    EXPECT_EQ(momentum, expected) << kernels.target_name;
  }
}

// fp16_from_float() in vectors: every fp32 value whose upper half or rounding bits decide.
TEST(UpdateSimd, MastersAreRoundedToFp16) {
  const SgdCoefficients keep = sgd_coefficients({.momentum = 0.0, .weight_decay = 0.0}, 0.0, 1.0f);
  constexpr std::uint16_t kLows[] = {0, 1, 0x0fff, 0x1000, 0x1001, 0x2000, 0x3000, 0xf000, 0xffff};
  std::vector<float> masters;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint16_t low : kLows) masters.push_back(float_from_bits(high << 16 | low));
  }
  const std::vector<float> gradient(masters.size(), 1.0f);
  for (const SimdKernels& kernels : available_simd_kernels()) {
    std::vector<float> master = masters;
    std::vector<float> momentum(masters.size(), 0.0f);
    std::vector<std::uint16_t> parameter(masters.size());
    kernels.update(keep, {.master_layout = MasterLayout::kFp16,
                          .parameter = parameter.data(),
                          .master = master.data(),
                          .exp_avg = momentum.data(),
                          .gradient = gradient.data(),
                          .element_count = masters.size()});
    for (std::size_t i = 0; i < masters.size(); ++i) {
      const std::uint16_t expected = fp16_from_float(master[i]);
      const bool both_nan = std::isnan(master[i]) && std::isnan(float_from_fp16(parameter[i]));
      ASSERT_TRUE(both_nan || parameter[i] == expected)
          << kernels.target_name << fmt::format(" {:08x}", bits_from_float(masters[i]));
    }
  }
}

// The largest finite values that stay finite as compute parameters, and their successors; at a
// place that vectors handle and at one of the scalar rest.
TEST(UpdateSimd, MastersThatAreNotFiniteAreNoticed) {
  const SgdCoefficients keep = sgd_coefficients({.momentum = 0.0, .weight_decay = 0.0}, 0.0, 1.0f);
  const struct {
    MasterLayout layout;
    float last_finite;
  } cases[] = {{MasterLayout::kFp32, float_from_bits(0x7f7fffff)},
               {MasterLayout::kSplitBf16, float_from_bits(0x7f7f7fff)},
               {MasterLayout::kFp16, float_from_bits(0x477fefff)}};
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const auto& [layout, last_finite] : cases) {
      for (const std::uint64_t place : {0u, 40u, 96u}) {
        for (const float sign : {1.0f, -1.0f}) {
          OptimizerData data({.master_layout = layout, .element_count = 97});
          data.set_master(place, sign * last_finite);
          EXPECT_EQ(kernels.update(keep, data.arrays()).state, NewState::kFinite);
          EXPECT_EQ(find_non_finite_state(data.arrays()).element, 97u);
          data.set_master(place, sign * float_from_bits(bits_from_float(last_finite) + 1));
          EXPECT_EQ(kernels.update(keep, data.arrays()).state, NewState::kNonFinite)
              << kernels.target_name << " " << static_cast<int>(layout) << " " << place;
          EXPECT_EQ(find_non_finite_state(data.arrays()).element, place);
          data.set_master(place, NAN);
          EXPECT_EQ(kernels.update(keep, data.arrays()).state, NewState::kNonFinite);
        }
      }
    }
  }
}

// A moment that overflows where the master does not show it: of all optimizers but SGD, in every
// layout, at places that vectors handle, in the first strip and in the last, and in the scalar
// rest. The finite moments have every exponent, so that the filter of a strip takes none for
// granted.
TEST(UpdateSimd, MomentsThatAreNotFiniteAreNoticed) {
  constexpr unsigned kCount = 1121;
  const struct {
    UpdateCoefficients coefficients;
    std::string_view part;
  } cases[] = {{adam_coefficients({}, 1e-3, 1, 1.0f), "exp_avg_sq"},
               {adam_l2_coefficients({}, 1e-3, 1, 1.0f), "exp_avg_sq"},
               {lion_coefficients({}, 1e-3, 2.0f), "exp_avg"},
               {adagrad_coefficients({}, 1e-3, 1.0f), "exp_avg_sq"}};
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const MasterLayout layout : kMasterLayouts) {
      for (const auto& [coefficients, part] : cases) {
        for (const std::uint64_t place : {kCount, 0u, 511u, 512u, 1030u, kCount - 1}) {
          for (const float sign : {1.0f, -1.0f}) {
            OptimizerData data({.master_layout = layout,
                                .keeps_exp_avg = keeps_exp_avg(coefficients),
                                .keeps_exp_avg_sq = keeps_exp_avg_sq(coefficients),
                                .element_count = kCount});
            std::vector<float> gradient(kCount);
            for (unsigned i = 0; i < kCount; ++i)
              gradient[i] = std::ldexp(1.0f, static_cast<int>(i % 61));
            if (place < gradient.size()) gradient[place] = sign * 3e38f;
            UpdateArrays arrays = data.arrays();
            arrays.gradient = gradient.data();
            SCOPED_TRACE(fmt::format("{} {} {} {}", kernels.target_name, static_cast<int>(layout),
                                     coefficients.index(), place));
            EXPECT_EQ(kernels.update(coefficients, arrays).state,
                      place == kCount ? NewState::kFinite : NewState::kNonFinite);
            EXPECT_EQ(find_non_finite_state(arrays).element, place);
            EXPECT_EQ(find_non_finite_state(arrays).part, place == kCount ? "" : part);
          }
        }
      }
    }
  }
}

TEST(UpdateSimd, TheMoverLeavesTheState) {
  for (const MasterLayout layout : kMasterLayouts) {
    for (const DType dtype : kDtypes) {
      OptimizerData data({.master_layout = layout, .gradient_dtype = dtype, .element_count = 1021});
      const OptimizerData start = data;
      move_like_update(data.arrays(), 0);
      if (layout == MasterLayout::kFp16) {
        for (std::uint64_t i = 0; i < 1021; ++i) ASSERT_EQ(data.master(i), start.master(i));
      } else {
        ASSERT_EQ(data.difference(start), "");
      }
      move_like_update(data.arrays(), 1);
      EXPECT_NE(data.difference(start), "") << "moves nothing";
    }
  }
}

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
    kernels.update(keep, {.master_layout = MasterLayout::kSplitBf16,
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
  for (const MasterLayout layout : kMasterLayouts) {
    const OptimizerData start(
        {.master_layout = layout, .element_count = 10'007, .offset_elements = 1, .seed = 7});
    OptimizerData whole = start;
    update_simd(test_coefficients(), whole.arrays());
    OptimizerData pieces = start;
    std::mt19937 random(11);
    for (std::uint64_t begin = 0; begin < 10'007;) {
      const std::uint64_t count = std::min<std::uint64_t>(random() % 200, 10'007 - begin);
      update_simd(test_coefficients(), slice(pieces.arrays(), begin, count));
      begin += count;
    }
    EXPECT_EQ(pieces.difference(whole), "");
  }
}

using AdamDeathTest = ::testing::Test;

TEST(AdamDeathTest, RefusesArraysThatItsContractForbids) {
  OptimizerData data({.element_count = 4});
  UpdateArrays arrays = data.arrays();
  arrays.exp_avg_sq = nullptr;
  EXPECT_DEATH(update_simd(test_coefficients(), arrays), "needs exp_avg_sq");
  arrays = data.arrays();
  arrays.master_layout = MasterLayout::kSplitBf16;
  EXPECT_DEATH(update_simd(test_coefficients(), arrays), "split master");
  EXPECT_DEATH(slice(data.arrays(), 2, 3), "inside its arrays");
}

}  // namespace
}  // namespace sluice
