// Moments in bf16: the random bits and the rounding against their definition in words of its own,
// and updates with bf16 moments against fp32 updates between roundings.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/moment_rounding.h"
#include "cpu_optim/cpu_optimizer.h"
#include "cpu_optim/simd_kernels.h"
#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

std::uint32_t bits_of(std::uint64_t seed, std::uint64_t step, std::uint64_t tensor,
                      std::uint64_t element) {
  const std::uint64_t key = rounding_key_of_tensor(rounding_key_of_step(seed, step), tensor);
  return random_bits(rounding_words(key, element), static_cast<std::uint32_t>(element));
}

// Another program computed these from the description. A change of them would change the results
// of every run with bf16 moments.
TEST(MomentRounding, RandomBitsAreThoseOfTheDefinition) {
  EXPECT_EQ(bits_of(0, 1, 0, 0), 0xf107929fu);
  EXPECT_EQ(bits_of(0, 1, 0, 1), 0x15fc13dfu);
  EXPECT_EQ(bits_of(7, 1000, 3, 123456), 0x5b558340u);
  EXPECT_EQ(bits_of(1, 2, 0, (1ull << 32) + 5), 0x81e0f5a4u);
  EXPECT_EQ(bits_of(9007199254740991, 1, 70000, 0xffffffff), 0xec5584deu);
}

// Over 2^18 elements a fair coin deviates by 5 standard deviations once in 1.7 million.
TEST(MomentRounding, RandomBitsAreBalancedAndUnrelated) {
  constexpr std::uint64_t kCount = 1 << 18;
  const double limit = 5 * std::sqrt(kCount) / 2;
  struct Other {
    std::uint64_t seed, step, tensor, shift;
  };
  const Other others[] = {{1, 5, 2, 0}, {0, 6, 2, 0},   {0, 5, 3, 0},
                          {0, 5, 2, 1}, {0, 5, 2, 256}, {0, 5, 2, 1ull << 32}};
  std::array<std::uint64_t, 32> ones{};
  std::array<std::uint64_t, std::size(others)> equal{};
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const std::uint32_t own = bits_of(0, 5, 2, i);
    for (unsigned bit = 0; bit < 32; ++bit) ones[bit] += own >> bit & 1;
    for (std::size_t k = 0; k < std::size(others); ++k) {
      const Other& o = others[k];
      equal[k] += static_cast<unsigned>(
          std::popcount(~(own ^ bits_of(o.seed, o.step, o.tensor, i + o.shift))));
    }
  }
  for (const std::uint64_t count : ones)
    EXPECT_LT(std::fabs(static_cast<double>(count) - kCount / 2.0), limit);
  for (const std::uint64_t count : equal)
    EXPECT_LT(std::fabs(static_cast<double>(count) - 16.0 * kCount), limit * std::sqrt(32.0));
}

TEST(MomentRounding, GoesToANeighborAsOftenAsTheValueIsNear) {
  for (const std::uint32_t bits :
       {0x3f800000u, 0x3f800001u, 0x3f807fffu, 0x3f808000u, 0x3f80ffffu, 0xbf81c000u, 0x00000001u,
        0x0000ffffu, 0x80004000u, 0x7f7e8000u, 0x007fffffu, 0x3f7fffffu}) {
    const float value = float_from_bits(bits);
    const float below = float_from_bits(bits & 0xffff0000u);  // nearer to zero
    const float above = float_from_bits((bits & 0xffff0000u) + 0x10000u);
    std::uint32_t ups = 0;
    for (std::uint32_t random = 0; random < 0x10000; ++random) {
      const float rounded = float_from_bf16(round_moment(value, random));
      ASSERT_TRUE(bits_from_float(rounded) == bits_from_float(below) || rounded == above) << bits;
      if (rounded == above) ++ups;
    }
    EXPECT_EQ(ups, bits & 0xffffu) << "so the mean over all random bits is the value itself";
  }
}

TEST(MomentRounding, KeepsTheKindsOfNumbers) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::uint32_t random : {0u, 0x8000u, 0xffffu}) {
    EXPECT_EQ(round_moment(0.0f, random), 0u);
    EXPECT_EQ(round_moment(-0.0f, random), 0x8000u);
    EXPECT_EQ(round_moment(infinity, random), 0x7f80u);
    EXPECT_EQ(round_moment(-infinity, random), 0xff80u);
    EXPECT_FALSE(is_finite_half(round_moment(infinity, random)));
    EXPECT_TRUE(std::isnan(float_from_bf16(round_moment(float_from_bits(0x7f800001), random))));
    EXPECT_EQ(round_moment(std::numeric_limits<float>::max(), random), 0x7f7fu);
    EXPECT_EQ(round_moment(-std::numeric_limits<float>::max(), random), 0xff7fu);
  }
  for (std::uint32_t half = 0; half < 0x10000; ++half) {
    const float value = float_from_bf16(static_cast<std::uint16_t>(half));
    if (std::isnan(value)) continue;
    ASSERT_EQ(nearest_moment(value), half);
    ASSERT_EQ(round_moment(value, 0xffff), half) << "a value that bf16 holds stays";
  }
  std::mt19937 random(3);
  for (int i = 0; i < 100'000; ++i) {
    const float value = float_from_bits(static_cast<std::uint32_t>(random()));
    if (!(std::fabs(value) < 0x1.ffp127f)) continue;
    ASSERT_EQ(nearest_moment(value), bf16_from_float(value)) << value;
  }
}

// exp_avg_sq of a constant gradient: rounding to nearest stops as soon as a step is less than half
// a unit in the last place.
TEST(MomentRounding, SmallChangesAddUp) {
  constexpr float kBeta = 0.999f;
  double sum = 0;
  constexpr int kElements = 200;
  for (std::uint64_t element = 0; element < kElements; ++element) {
    float moment = 0;
    for (std::uint64_t step = 1; step <= 4000; ++step)
      moment = float_from_bf16(
          round_moment(kBeta * moment + (1 - kBeta), bits_of(0, step, 0, element) >> 16));
    sum += moment;
  }
  const double exact = 1 - std::pow(static_cast<double>(kBeta), 4000);
  EXPECT_NEAR(sum / kElements, exact, 0.01);
  float nearest = 0;
  for (int step = 0; step < 4000; ++step)
    nearest = float_from_bf16(nearest_moment(kBeta * nearest + (1 - kBeta)));
  EXPECT_LT(nearest, 0.6) << "the reason for rounding stochastically";
}

// Elements with moments in bf16, in place of the moments of `data`.
struct Bf16Data {
  explicit Bf16Data(const OptimizerData::Options& options)
      : data(options), exp_avg(options.element_count), exp_avg_sq(options.element_count) {
    for (std::uint64_t i = 0; i < options.element_count; ++i) {
      exp_avg[i] = nearest_moment(data.exp_avg(i));
      exp_avg_sq[i] = nearest_moment(data.exp_avg_sq(i));
    }
  }
  UpdateArrays arrays(std::uint64_t first_element) {
    UpdateArrays arrays = data.arrays();
    if (arrays.exp_avg != nullptr) arrays.exp_avg_bf16 = exp_avg.data();
    if (arrays.exp_avg_sq != nullptr) arrays.exp_avg_sq_bf16 = exp_avg_sq.data();
    arrays.exp_avg = arrays.exp_avg_sq = nullptr;
    arrays.rounding = {.key = 0x123456789abcdefu, .first_element = first_element};
    return arrays;
  }
  std::string difference(const Bf16Data& other) const {
    if (exp_avg != other.exp_avg) return "exp_avg";
    if (exp_avg_sq != other.exp_avg_sq) return "exp_avg_sq";
    return data.difference(other.data);
  }

  OptimizerData data;
  std::vector<std::uint16_t> exp_avg;
  std::vector<std::uint16_t> exp_avg_sq;
};

constexpr std::uint64_t kFirst[] = {0, 77, (1ull << 32) - 600, (5ull << 32) + 3};

// The definition, in words of its own: an fp32 update, then each moment goes to a neighbor.
TEST(UpdateBf16, TheDefinitionIsAnFp32UpdateBetweenRoundings) {
  constexpr std::uint64_t kCount = 1500;
  for (const std::uint64_t first : kFirst) {
    for (const UpdateCoefficients& coefficients : all_test_coefficients()) {
      Bf16Data rounded(options_for(coefficients, MasterLayout::kFp32, kCount));
      OptimizerData plain(options_for(coefficients, MasterLayout::kFp32, kCount));
      UpdateArrays arrays = plain.arrays();
      const auto round = [&](float* moment, bool is_start, unsigned shift) {
        for (std::uint64_t i = 0; moment != nullptr && i < kCount; ++i) {
          const std::uint64_t element = first + i;
          const std::uint32_t random =
              is_start ? 0x7fff + (bits_from_float(moment[i]) >> 16 & 1)
                       : random_bits(rounding_words(0x123456789abcdefu, element),
                                     static_cast<std::uint32_t>(element)) >>
                                 shift &
                             0xffff;
          const std::uint32_t bits = bits_from_float(moment[i]);
          moment[i] = float_from_bits((bits & 0xffff0000u) +
                                      ((bits & 0xffffu) + random >= 0x10000 ? 0x10000u : 0u));
        }
      };
      round(arrays.exp_avg, true, 0);
      round(arrays.exp_avg_sq, true, 16);
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(update_reference(coefficients, rounded.arrays(first)), NewState::kFinite);
        update_reference(coefficients, arrays);
        round(arrays.exp_avg, false, 0);
        round(arrays.exp_avg_sq, false, 16);
        for (std::uint64_t i = 0; i < kCount; ++i) {
          ASSERT_EQ(rounded.data.master(i), plain.master(i)) << coefficients.index() << " " << i;
          if (arrays.exp_avg != nullptr) {
            ASSERT_EQ(float_from_bf16(rounded.exp_avg[i]), arrays.exp_avg[i]) << i;
          }
          if (arrays.exp_avg_sq != nullptr) {
            ASSERT_EQ(float_from_bf16(rounded.exp_avg_sq[i]), arrays.exp_avg_sq[i]) << i;
          }
        }
      }
    }
  }
}

TEST(UpdateBf16, EveryInstructionSetEqualsTheDefinition) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const UpdateCoefficients& coefficients : all_test_coefficients()) {
      for (const MasterLayout layout : kMasterLayouts) {
        for (const std::uint64_t count : {1u, 256u, 1025u, 5000u}) {
          for (const std::uint64_t first : kFirst) {
            Bf16Data expected(options_for(coefficients, layout, count));
            Bf16Data actual = expected;
            const Bf16Data start = expected;
            for (int step = 0; step < 2; ++step) {
              EXPECT_EQ(kernels.update(coefficients, actual.arrays(first)).state,
                        update_reference(coefficients, expected.arrays(first)));
            }
            ASSERT_EQ(actual.difference(expected), "")
                << kernels.target_name << " " << coefficients.index() << " " << count;
            EXPECT_NE(actual.difference(start), "") << "the update did nothing";
          }
        }
      }
    }
  }
}

// Moments of every kind of value, and of values that do not fit.
TEST(UpdateBf16, EveryInstructionSetRoundsEveryKindOfMoment) {
  constexpr std::uint64_t kCount = 4099;
  std::mt19937 random(11);
  std::vector<float> m(kCount), v(kCount);
  for (std::uint64_t i = 0; i < kCount; ++i) {
    m[i] = special_value(random);
    v[i] = special_value(random);
  }
  std::vector<std::uint16_t> expected_m(kCount), expected_v(kCount);
  UpdateArrays target{.exp_avg_bf16 = expected_m.data(),
                      .exp_avg_sq_bf16 = expected_v.data(),
                      .rounding = {.key = 9, .first_element = 40},
                      .element_count = kCount};
  std::uint32_t gradient = 0;
  target.parameter = &gradient;
  target.gradient = &gradient;
  round_moments_reference({m.data(), v.data()}, target);
  for (const SimdKernels& kernels : available_simd_kernels()) {
    std::vector<std::uint16_t> actual_m(kCount), actual_v(kCount);
    target.exp_avg_bf16 = actual_m.data();
    target.exp_avg_sq_bf16 = actual_v.data();
    kernels.round_moments({m.data(), v.data()}, target);
    EXPECT_EQ(actual_m, expected_m) << kernels.target_name;
    EXPECT_EQ(actual_v, expected_v) << kernels.target_name;
  }
}

bool is_same_half(std::uint16_t actual, std::uint16_t expected) {
  const auto is_nan = [](std::uint16_t half) { return (half & 0x7fffu) > 0x7f80u; };
  return actual == expected ||
         (is_nan(actual) && is_nan(expected));  // a NaN may differ in its sign
}

void set_largest_gradient(const UpdateArrays& arrays, std::uint64_t i) {
  void* const gradient = const_cast<void*>(arrays.gradient);
  if (arrays.gradient_dtype == DType::kFp32) {
    static_cast<float*>(gradient)[i] = std::numeric_limits<float>::max();
  } else {
    static_cast<std::uint16_t*>(gradient)[i] = kLargestBf16;
  }
}

// The new moments are of every kind: next to the largest number, beyond it, infinite and NaN. Most
// strips of a vector kernel have a few of these, and some have none.
TEST(UpdateBf16, EveryInstructionSetUpdatesEveryKindOfMoment) {
  constexpr std::uint64_t kCount = 20'000;
  const UpdateCoefficients coefficients = test_coefficients(3, 1.0f);
  constexpr std::uint16_t kKinds[] = {0x7f7f, 0xff7f, 0x7f7e, 0x7f00, 0x7eff,
                                      0x7f80, 0xff80, 0x7fc0, 0x8000, 0x0001};
  for (const MasterLayout layout : {MasterLayout::kFp32, MasterLayout::kSplitBf16}) {
    Bf16Data start(options_for(coefficients, layout, kCount));
    const UpdateArrays arrays = start.arrays(40);
    std::mt19937 random(12);
    for (std::uint64_t i = 0; i < kCount; ++i) {
      if (i % 4096 >= 3000 || random() % 20 != 0) continue;
      start.exp_avg[i] = kKinds[random() % std::size(kKinds)];
      start.exp_avg_sq[i] = kKinds[random() % std::size(kKinds)] & 0x7fff;
      if (start.exp_avg[i] == 0x7f7f) set_largest_gradient(arrays, i);
    }
    Bf16Data expected = start;
    update_reference(coefficients, expected.arrays(40));
    const auto at_limit = std::ranges::count(expected.exp_avg, 0x7f7f);
    EXPECT_GT(at_limit, 5) << "a carry would make them infinite";
    for (const SimdKernels& kernels : available_simd_kernels()) {
      Bf16Data actual = start;
      EXPECT_EQ(kernels.update(coefficients, actual.arrays(40)).state, NewState::kNonFinite);
      for (std::uint64_t i = 0; i < kCount; ++i) {
        ASSERT_TRUE(is_same_half(actual.exp_avg[i], expected.exp_avg[i]))
            << kernels.target_name << " " << i;
        ASSERT_TRUE(is_same_half(actual.exp_avg_sq[i], expected.exp_avg_sq[i]))
            << kernels.target_name << " " << i;
      }
    }
  }
}

TEST(UpdateBf16, ThreadsChangeNothing) {
  const UpdateCoefficients coefficients = test_coefficients();
  Bf16Data expected(options_for(coefficients, MasterLayout::kSplitBf16, 150'000));
  const Bf16Data start = expected;
  update_reference(coefficients, expected.arrays(12'345));
  for (const unsigned threads : {1u, 2u, 5u}) {
    Bf16Data actual = start;
    CpuOptimizer optimizer(threads);
    optimizer.update(coefficients, actual.arrays(12'345));
    EXPECT_EQ(actual.difference(expected), "") << threads;
  }
}

TEST(UpdateBf16, MomentsThatAreNotFiniteAreNoticedAndNamed) {
  const UpdateCoefficients coefficients = adam_coefficients({}, 1e-3, 1, 1.0f);
  Bf16Data data(options_for(coefficients, MasterLayout::kFp32, 1000));
  std::vector<float> gradient(1000, 1.0f);
  gradient[600] = 3e38f;  // its square overflows, its master does not
  UpdateArrays arrays = data.arrays(0);
  arrays.gradient = gradient.data();
  EXPECT_EQ(update_simd(coefficients, arrays), NewState::kNonFinite);
  const NonFiniteState found = find_non_finite_state(arrays);
  EXPECT_EQ(found.element, 600u);
  EXPECT_EQ(found.part, "exp_avg_sq");
}

TEST(UpdateBf16, TheMoverLeavesTheState) {
  for (const UpdateCoefficients& coefficients : all_test_coefficients()) {
    Bf16Data data(options_for(coefficients, MasterLayout::kSplitBf16, 1021));
    const Bf16Data start = data;
    move_like_update(data.arrays(0), 0);
    EXPECT_EQ(data.difference(start), "");
  }
}

TEST(UpdateBf16, MovesTwoBytesAMoment) {
  const UpdateCoefficients coefficients = test_coefficients();
  Bf16Data data(options_for(coefficients, MasterLayout::kSplitBf16, 100));
  const UpdateBytes bytes = bytes_per_element(data.arrays(0));
  EXPECT_EQ(bytes.read, 4u + 2 + 2 + 2);
  EXPECT_EQ(bytes.write, 4u + 2 + 2);
}

}  // namespace
}  // namespace sluice
