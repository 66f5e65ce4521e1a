// Accumulation and the squared norm: every instruction set against the scalar definition, and the
// definition against independent arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "cpu_optim/gradient_ops.h"
#include "cpu_optim/simd_kernels.h"
#include "tests/cpu_optim/optimizer_data.h"

namespace sluice {
namespace {

// A gradient in both dtypes: the fp32 one holds the same kind of values, not the same bits.
struct Gradient {
  Gradient(std::uint64_t element_count, Values values, std::uint32_t seed) {
    std::mt19937 random(seed);
    for (std::uint64_t i = 0; i < element_count; ++i) {
      fp32.push_back(value(values, 0.02f, random));
      bf16.push_back(static_cast<std::uint16_t>(bits_from_float(fp32.back()) >> 16));
    }
  }
  // The same 16 bits are read as bf16 and as fp16.
  void* at(DType dtype, std::uint64_t offset) {
    return dtype == DType::kFp32 ? static_cast<void*>(fp32.data() + offset)
                                 : static_cast<void*>(bf16.data() + offset);
  }
  float get(DType dtype, std::uint64_t i) const {
    if (dtype == DType::kFp32) return fp32[i];
    return dtype == DType::kBf16 ? float_from_bf16(bf16[i]) : float_from_fp16(bf16[i]);
  }

  std::vector<float> fp32;
  std::vector<std::uint16_t> bf16;
};

constexpr DType kDtypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};

void expect_same(const Gradient& actual, const Gradient& expected, DType dtype,
                 std::string_view target) {
  for (std::uint64_t i = 0; i < actual.fp32.size(); ++i) {
    ASSERT_TRUE(OptimizerData::same(actual.get(dtype, i), expected.get(dtype, i)))
        << target << ", " << name_of(dtype) << ", element " << i << " of " << actual.fp32.size();
  }
}

TEST(Accumulate, EveryTargetEqualsReference) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const DType dtype : kDtypes) {
      for (std::uint64_t count = 0; count <= 300; ++count) {
        const std::uint64_t offset = count % 7;
        const auto seed = static_cast<std::uint32_t>(count);
        Gradient expected(count + offset + 17, Values::kAny, seed);
        Gradient actual = expected;
        Gradient source(count + offset + 17, Values::kAny, seed + 1000);
        accumulate_gradient_reference(dtype, expected.at(dtype, offset), source.at(dtype, 0),
                                      count);
        EXPECT_EQ(kernels.accumulate_gradient(dtype, actual.at(dtype, offset), source.at(dtype, 0),
                                              count),
                  kernels.target_name);
        ASSERT_NO_FATAL_FAILURE(expect_same(actual, expected, dtype, kernels.target_name));
      }
    }
  }
}

TEST(Accumulate, EveryBf16ValueRoundsAlike) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const std::uint16_t addend : std::initializer_list<std::uint16_t>{
             0x0000, 0x3b80, 0x3f80, 0xbf81, 0x0001, 0x7f7f, 0x7f80}) {
      Gradient expected(0x10000, Values::kOrdinary, 1);
      for (std::uint32_t i = 0; i < 0x10000; ++i) expected.bf16[i] = static_cast<std::uint16_t>(i);
      Gradient actual = expected;
      std::vector<std::uint16_t> source(0x10000, addend);
      accumulate_gradient_reference(DType::kBf16, expected.bf16.data(), source.data(), 0x10000);
      kernels.accumulate_gradient(DType::kBf16, actual.bf16.data(), source.data(), 0x10000);
      ASSERT_NO_FATAL_FAILURE(expect_same(actual, expected, DType::kBf16, kernels.target_name));
    }
  }
}

TEST(Accumulate, RoundsTiesToEvenAndOverflowsToInfinity) {
  // 1 + 2^-8 and 1.0078125 + 2^-8 lie halfway between neighbours: down to 0x3f80, up to 0x3f82.
  std::vector<std::uint16_t> target = {0x3f80, 0x3f81, 0x7f7f, 0xff7f};
  const std::vector<std::uint16_t> source = {0x3b80, 0x3b80, 0x7f7f, 0xff7f};
  accumulate_gradient(DType::kBf16, target.data(), source.data(), target.size());
  EXPECT_EQ(target, (std::vector<std::uint16_t>{0x3f80, 0x3f82, 0x7f80, 0xff80}));
}

TEST(SquaredNorm, EveryTargetEqualsReference) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const DType dtype : kDtypes) {
      for (const std::uint64_t count :
           {0u, 1u, 7u, 8u, 9u, 255u, 256u, 257u, 511u, 512u, 1000u, 4096u, 100'001u}) {
        for (const std::uint64_t offset : {0u, 1u, 3u}) {
          Gradient gradient(count + offset, Values::kOrdinary, 9);
          NormAccumulator expected;
          add_squared_norm_reference(dtype, gradient.at(dtype, offset), count, expected);
          NormAccumulator actual;
          EXPECT_EQ(kernels.add_squared_norm(dtype, gradient.at(dtype, offset), count, actual),
                    kernels.target_name);
          EXPECT_EQ(actual.sum_of_squares(), expected.sum_of_squares())
              << kernels.target_name << ", " << name_of(dtype) << ", " << count;
          EXPECT_TRUE(actual.finite());
        }
      }
    }
  }
}

double square(float x) {
  return static_cast<double>(x) * static_cast<double>(x);
}

// The sum of eight lanes, added in pairs, in pairs of pairs, and so on.
double tree(const std::array<double, 8>& lanes, const std::array<std::size_t, 8>& order) {
  const auto at = [&](std::size_t i) { return lanes[order[i]]; };
  return ((at(0) + at(1)) + (at(2) + at(3))) + ((at(4) + at(5)) + (at(6) + at(7)));
}

// A leaf by itself, on data where every other order that is tried gives other bits.
TEST(SquaredNorm, LeafTreeIsTheOneOfTheContract) {
  constexpr std::array<std::size_t, 8> kOrder = {0, 4, 2, 6, 1, 5, 3, 7};
  constexpr std::array<std::size_t, 8> kOthers[] = {{0, 1, 2, 3, 4, 5, 6, 7},
                                                    {0, 2, 4, 6, 1, 3, 5, 7},
                                                    {0, 2, 4, 6, 1, 5, 3, 7},
                                                    {0, 4, 2, 6, 1, 3, 5, 7},
                                                    {0, 4, 1, 5, 2, 6, 3, 7}};
  for (std::uint32_t seed = 1; seed <= 20'000; ++seed) {
    // From 1 downwards, so that most squares reach below the last bit of the sum.
    Gradient gradient(kNormLeafElements, Values::kOrdinary, seed);
    std::array<double, 8> lanes{};
    double in_order = 0;
    for (std::uint64_t i = 0; i < kNormLeafElements; ++i) {
      gradient.fp32[i] = std::ldexp(gradient.fp32[i], -static_cast<int>(i / 16));
      lanes[i % 8] += square(gradient.fp32[i]);
      in_order += square(gradient.fp32[i]);
    }
    const double leaf = tree(lanes, kOrder);
    if (leaf == in_order ||
        std::ranges::any_of(kOthers, [&](const auto& other) { return tree(lanes, other) == leaf; }))
      continue;
    NormAccumulator reference;
    add_squared_norm_reference(DType::kFp32, gradient.fp32.data(), kNormLeafElements, reference);
    EXPECT_EQ(reference.sum_of_squares(), leaf);
    for (const SimdKernels& kernels : available_simd_kernels()) {
      NormAccumulator total;
      kernels.add_squared_norm(DType::kFp32, gradient.fp32.data(), kNormLeafElements, total);
      EXPECT_EQ(total.sum_of_squares(), leaf) << kernels.target_name;
    }
    return;
  }
  FAIL() << "no data tells the orders apart";
}

// Relative error: a leaf is a sum of non-negative terms in a tree of depth 31 + 3 and each addition
// errs by 2^-53 at most; the total rounds once more. 36 covers 35 and the oracle's own error.
TEST(SquaredNorm, AgreesWithLongDouble) {
  if (std::numeric_limits<long double>::digits < 64)
    GTEST_SKIP() << "long double is no wider than double here";
  for (const DType dtype : kDtypes) {
    Gradient gradient(100'003, Values::kOrdinary, 33);
    for (std::uint64_t i = 0; i < gradient.fp32.size(); i += 97) gradient.fp32[i] *= 1e6f;
    long double expected = 0;
    for (std::uint64_t begin = 0; begin < gradient.fp32.size(); begin += 256) {
      long double part = 0;
      for (std::uint64_t i = begin; i < std::min<std::uint64_t>(begin + 256, 100'003); ++i) {
        const auto x = static_cast<long double>(gradient.get(dtype, i));
        part += x * x;
      }
      expected += part;
    }
    NormAccumulator total;
    add_squared_norm(dtype, gradient.at(dtype, 0), gradient.fp32.size(), total);
    EXPECT_LE(std::fabs((total.sum_of_squares() - expected) / expected), 36 * 0x1p-53L);
  }
}

TEST(SquaredNorm, DenormalsAndHugeValuesAreExact) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    std::vector<float> gradient(512, 0.0f);
    gradient[5] = 0x1p-149f;
    NormAccumulator tiny;
    kernels.add_squared_norm(DType::kFp32, gradient.data(), 512, tiny);
    EXPECT_EQ(tiny.sum_of_squares(), 0x1p-298) << kernels.target_name;
    gradient[300] = 0x1p127f;
    NormAccumulator huge;
    kernels.add_squared_norm(DType::kFp32, gradient.data(), 512, huge);
    EXPECT_EQ(huge.sum_of_squares(), 0x1p254) << kernels.target_name;
  }
}

TEST(SquaredNorm, ReportsNonFinite) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
      for (const std::uint64_t place : {0u, 255u, 700u}) {
        std::vector<float> gradient(701, 1.0f);
        gradient[place] = bad;
        NormAccumulator total;
        kernels.add_squared_norm(DType::kFp32, gradient.data(), gradient.size(), total);
        EXPECT_FALSE(total.finite()) << kernels.target_name << " " << place;
      }
    }
  }
}

// Bytes and words, so of zeros and NaNs too; and it adds to the norm that is there.
TEST(AccumulateWithNorm, GivesTheBitsOfTwoPasses) {
  for (const DType dtype : kDtypes) {
    for (const Values values : {Values::kOrdinary, Values::kAny}) {
      for (const std::uint64_t count :
           {0u, 1u, 7u, 255u, 256u, 257u, 2047u, 2048u, 2049u, 4096u, 6143u, 100'001u}) {
        for (const std::uint64_t offset : {0u, 1u, 3u}) {
          Gradient expected(count + offset, values, 5);
          Gradient actual = expected;
          Gradient source(count + offset, values, 6);
          NormAccumulator expected_norm;
          add_squared_norm(dtype, source.at(dtype, 0), values == Values::kAny ? 0 : count,
                           expected_norm);
          NormAccumulator norm = expected_norm;
          accumulate_gradient(dtype, expected.at(dtype, offset), source.at(dtype, offset), count);
          add_squared_norm(dtype, expected.at(dtype, offset), count, expected_norm);
          accumulate_with_norm(dtype, actual.at(dtype, offset), source.at(dtype, offset), count,
                               norm);
          const std::uint64_t size_bytes = (count + offset) * size_of(dtype);
          EXPECT_TRUE(size_bytes == 0 ||
                      std::memcmp(actual.at(dtype, 0), expected.at(dtype, 0), size_bytes) == 0)
              << name_of(dtype) << ", " << count;
          EXPECT_EQ(norm.words(), expected_norm.words()) << name_of(dtype) << ", " << count;
        }
      }
    }
  }
}

TEST(FindNonFinite, NamesTheFirst) {
  std::vector<float> fp32(1000, std::numeric_limits<float>::max());
  EXPECT_EQ(find_non_finite(DType::kFp32, fp32.data(), fp32.size()), std::nullopt);
  fp32[999] = std::nanf("");
  fp32[417] = -HUGE_VALF;
  EXPECT_EQ(find_non_finite(DType::kFp32, fp32.data(), fp32.size()), 417u);
  EXPECT_EQ(find_non_finite(DType::kFp32, fp32.data(), 417), std::nullopt);
  std::vector<std::uint16_t> bf16(1000, 0x7f7f);
  EXPECT_EQ(find_non_finite(DType::kBf16, bf16.data(), bf16.size()), std::nullopt);
  bf16[3] = 0xffc0;
  EXPECT_EQ(find_non_finite(DType::kBf16, bf16.data(), bf16.size()), 3u);
}

}  // namespace
}  // namespace sluice
