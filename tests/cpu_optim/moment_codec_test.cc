// 8-bit moments: codes against a search through the whole code book, saved moments, and updates
// with codes against the definition.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu_optim/cpu_optimizer.h"
#include "cpu_optim/moment_codec.h"
#include "cpu_optim/simd_kernels.h"
#include "tests/cpu_optim/moment_data.h"
#include "tests/cpu_optim/optimizer_data.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace sluice {
namespace {

constexpr CodeBook kBooks[] = {CodeBook::kSigned, CodeBook::kUnsigned};

// The nearest code, the lower one of two that are equally near. Differences of fp32 values above
// 2^-30 are exact in long double.
std::uint32_t searched_code(CodeBook book, float value) {
  std::uint32_t best = 0;
  for (std::uint32_t code = 1; code < 256; ++code) {
    const auto distance = [&](std::uint32_t of) {
      return std::fabs(static_cast<long double>(value) -
                       static_cast<long double>(code_value(book, of)));
    };
    if (distance(code) < distance(best)) best = code;
  }
  return best;
}

// Halfway between the value of a code and that of the next one.
double middle_above(CodeBook book, std::uint32_t code) {
  return (static_cast<double>(code_value(book, code)) +
          static_cast<double>(code_value(book, code + 1))) /
         2;
}

// Values between -1 and 1 that decide: the middles between codes, and their neighbors.
std::vector<float> deciding_values(CodeBook book) {
  std::vector<float> values;
  for (std::uint32_t code = 0; code < 255; ++code) {
    const auto middle = static_cast<float>(middle_above(book, code));
    values.insert(values.end(), {std::nextafter(middle, -2.0f), middle,
                                 std::nextafter(middle, 2.0f), code_value(book, code)});
  }
  std::mt19937 random(7);
  for (int i = 0; i < 20'000; ++i) {
    const float magnitude = std::ldexp(1 + static_cast<float>(random() % 8192) / 8192,
                                       -1 - static_cast<int>(random() % 26));
    values.push_back(random() % 2 == 0 || book == CodeBook::kUnsigned ? magnitude : -magnitude);
  }
  return values;
}

TEST(MomentCodec, GivesTheNearestCodeAndTheLowerOneOfTwo) {
  for (const CodeBook book : kBooks) {
    std::uint32_t ties = 0;
    const std::vector<float> values = deciding_values(book);
    for (std::size_t begin = 0; begin < values.size(); begin += 255) {
      std::vector<float> group{1.0f};
      for (std::size_t i = begin; i < std::min(begin + 255, values.size()); ++i)
        group.push_back(values[i]);
      const Codes fast = encoded(book, group);
      Codes slow(group.size());
      encode_moments_reference(book, group, slow.view());
      ASSERT_TRUE(fast == slow);
      ASSERT_EQ(fast.scales[0], 1.0f);
      for (std::size_t i = 0; i < group.size(); ++i) {
        const std::uint32_t expected = searched_code(book, group[i]);
        ASSERT_EQ(fast.codes[i], expected) << group[i];
        if (expected < 255 && middle_above(book, expected) == static_cast<double>(group[i])) ++ties;
      }
    }
    EXPECT_GT(ties, 50u);
  }
}

TEST(MomentCodec, GroupsHaveTheirOwnScales) {
  std::vector<float> values(700, 0.0f);  // two groups, and a shorter one
  values[3] = -8.0f;
  values[4] = 4.0f;
  values[699] = 0x1p-140f;  // denormal
  Codes codes = encoded(CodeBook::kSigned, values);
  EXPECT_EQ(codes.scales, (std::vector<float>{8.0f, 0.0f, 0x1p-140f}));
  EXPECT_EQ(codes.codes[0], 127);
  EXPECT_EQ(codes.codes[3], 0);  // there is no code of -1
  EXPECT_EQ(codes.codes[300], 127);
  EXPECT_EQ(codes.codes[699], 255);
  const std::vector<float> back = decoded(CodeBook::kSigned, codes);
  EXPECT_NEAR(back[3], -8.0f, 0.06f);
  EXPECT_NEAR(back[4], 4.0f, 0.06f);
  EXPECT_EQ(back[699], 0x1p-140f);
  EXPECT_EQ(bits_from_float(back[300]), 0u);
  EXPECT_EQ(encoded(CodeBook::kUnsigned, std::vector<float>(256)).codes[9], 0);
  std::vector<float> part(5);
  decode_moments(CodeBook::kSigned, codes.view(), 2, part);  // from inside a group
  EXPECT_EQ(part, std::vector<float>(back.begin() + 2, back.begin() + 7));
}

TEST(MomentCodec, FastAndSlowAgreeOnAnyBits) {
  std::mt19937 random(11);
  for (int round = 0; round < 400; ++round) {
    std::vector<float> values;
    const float scale = std::ldexp(1.0f, static_cast<int>(random() % 240) - 140);
    const bool is_any = round % 4 == 0;
    for (int i = 0; i < 600; ++i) {
      const float value = sluice::value(is_any ? Values::kAny : Values::kOrdinary, scale, random);
      values.push_back(value);
    }
    for (const CodeBook book : kBooks) {
      std::vector<float> inputs = values;
      if (book == CodeBook::kUnsigned)
        for (float& value : inputs) value = std::fabs(value);
      Codes slow(inputs.size());
      encode_moments_reference(book, inputs, slow.view());
      ASSERT_TRUE(encoded(book, inputs) == slow) << round;
    }
  }
}

// Ratios to the scale that decide, in groups of several scales.
TEST(MomentCodec, EveryInstructionSetFindsTheNearestCodes) {
  std::mt19937 random(13);
  for (const CodeBook book : kBooks) {
    std::vector<float> ratios = deciding_values(book);
    for (int exponent = -8; exponent <= 0; ++exponent) {
      auto power = static_cast<float>(std::pow(10.0, exponent));
      for (const float from : {power, -power}) {
        float value = std::nextafter(std::nextafter(from, 0.0f), 0.0f);
        for (int i = 0; i < 5; ++i, value = std::nextafter(value, 2 * from))
          if (value >= 0 || book == CodeBook::kSigned) ratios.push_back(value);
      }
    }
    for (int i = 0; i < 300'000; ++i) {
      const float magnitude = std::ldexp(static_cast<float>(random() >> 8) * 0x1p-24f,
                                         -static_cast<int>(random() % 28));
      ratios.push_back(book == CodeBook::kSigned && random() % 2 == 0 ? -magnitude : magnitude);
    }
    for (const float scale : {1.0f, 3.1e-5f, 0x1p-149f, 0x1.fffffep127f}) {
      std::vector<float> values;
      for (const float ratio : ratios) {
        if (std::fabs(ratio) > 1) continue;
        if (values.size() % kMomentGroupElements == 17) values.push_back(scale);
        values.push_back(ratio * scale);
      }
      // Groups for the definition among those for vectors: of zeros, and of numbers that are lost.
      std::fill_n(values.begin() + 5 * 256, 256, 0.0f);
      values[9 * 256 + 3] = std::numeric_limits<float>::infinity();
      values[10 * 256] = std::numeric_limits<float>::quiet_NaN();
      Codes expected(values.size());
      encode_moments_reference(book, values, expected.view());
      std::vector<float> meant(values.size());
      decode_moments(book, expected.view(), 0, meant);
      for (const SimdKernels& kernels : available_simd_kernels()) {
        Codes actual(values.size());
        kernels.encode_codes(book, values, actual.view());
        ASSERT_TRUE(actual == expected) << kernels.target_name << " scale " << scale;
        std::vector<float> decoded(values.size());
        kernels.decode_codes(book, actual.view(), decoded);
        for (std::size_t i = 0; i < meant.size(); ++i)
          ASSERT_TRUE(decoded[i] == meant[i] || (std::isnan(decoded[i]) && std::isnan(meant[i])))
              << kernels.target_name << " element " << i;
      }
    }
  }
}

TEST(MomentCodec, ValuesThatAreNotFiniteAreMarked) {
  for (const float lost : {INFINITY, -INFINITY, NAN, -NAN}) {
    std::vector<float> values(256, 1.0f);
    values[77] = lost;
    const Codes codes = encoded(CodeBook::kSigned, values);
    for (std::size_t i = 0; i < values.size(); ++i)
      EXPECT_EQ(is_lost_moment(codes.codes[i], codes.scales[0]), i == 77);
  }
}

// Moments that have been 8 bits once come back with the same bits, from any scale, with the largest
// magnitude at either sign.
TEST(MomentCodec, SavedMomentsComeBack) {
  std::mt19937 random(5);
  int other_scales = 0;
  for (int round = 0; round < 2000; ++round) {
    const float scale = std::ldexp(1 + static_cast<float>(random() % 4096) / 4096,
                                   static_cast<int>(random() % 200) - 110);
    for (const CodeBook book : kBooks) {
      std::vector<float> values;
      for (int i = 0; i < 256; ++i) {
        const float value = std::normal_distribution<float>()(random);
        values.push_back(scale * (book == CodeBook::kSigned ? value : value * value));
      }
      Codes codes = encoded(book, values);
      const std::vector<float> saved = decoded(book, codes);
      Codes again(saved.size());
      encode_saved_moments(book, saved, again.view());
      ASSERT_EQ(decoded(book, again), saved) << round;
      Codes naive = encoded(book, saved);
      if (decoded(book, naive) != saved) ++other_scales;
    }
  }
  EXPECT_GT(other_scales, 500);  // groups whose largest magnitude is negative
}

// An update's arrays with codes in place of fp32 moments.
struct CodedData {
  explicit CodedData(const OptimizerData::Options& options)
      : data(options), exp_avg(options.element_count), exp_avg_sq(options.element_count) {
    const UpdateArrays arrays = data.arrays();
    if (arrays.exp_avg != nullptr)
      encode_moments(CodeBook::kSigned, {arrays.exp_avg, arrays.element_count}, exp_avg.view());
    if (arrays.exp_avg_sq != nullptr)
      encode_moments(CodeBook::kUnsigned, {arrays.exp_avg_sq, arrays.element_count},
                     exp_avg_sq.view());
  }

  UpdateArrays arrays() {
    UpdateArrays made = data.arrays();
    if (made.exp_avg != nullptr) made.exp_avg_codes = exp_avg.view();
    if (made.exp_avg_sq != nullptr) made.exp_avg_sq_codes = exp_avg_sq.view();
    made.exp_avg = made.exp_avg_sq = nullptr;
    return made;
  }

  std::string difference(const CodedData& other) const {
    if (!(exp_avg == other.exp_avg)) return "exp_avg";
    if (!(exp_avg_sq == other.exp_avg_sq)) return "exp_avg_sq";
    return data.difference(other.data);
  }

  OptimizerData data;
  Codes exp_avg;
  Codes exp_avg_sq;
};

// The definition, in words of its own: fp32 moments between steps are what the codes mean.
TEST(UpdateCodes, TheDefinitionIsAnFp32UpdateBetweenCodes) {
  for (const UpdateCoefficients& coefficients : all_test_coefficients()) {
    CodedData coded(options_for(coefficients, MasterLayout::kFp32, 1500));
    OptimizerData plain(options_for(coefficients, MasterLayout::kFp32, 1500));
    UpdateArrays arrays = plain.arrays();
    const auto through_codes = [&](CodeBook book, float* moment) {
      for (std::uint64_t begin = 0; moment != nullptr && begin < 1500; begin += 256) {
        const std::uint64_t end = std::min<std::uint64_t>(begin + 256, 1500);
        float largest = 0;
        for (std::uint64_t i = begin; i < end; ++i)
          largest = std::max(largest, std::fabs(moment[i]));
        for (std::uint64_t i = begin; i < end; ++i)
          moment[i] = code_value(book, searched_code(book, moment[i] / largest)) * largest;
      }
    };
    through_codes(CodeBook::kSigned, arrays.exp_avg);
    through_codes(CodeBook::kUnsigned, arrays.exp_avg_sq);
    for (int step = 0; step < 3; ++step) {
      EXPECT_EQ(update_reference(coefficients, coded.arrays()), NewState::kFinite);
      update_reference(coefficients, arrays);
      through_codes(CodeBook::kSigned, arrays.exp_avg);
      through_codes(CodeBook::kUnsigned, arrays.exp_avg_sq);
      const std::vector<float> m = decoded(CodeBook::kSigned, coded.exp_avg);
      const std::vector<float> v = decoded(CodeBook::kUnsigned, coded.exp_avg_sq);
      for (std::uint64_t i = 0; i < 1500; ++i) {
        ASSERT_EQ(coded.data.master(i), plain.master(i)) << coefficients.index() << " " << i;
        if (arrays.exp_avg != nullptr) {
          ASSERT_EQ(m[i], arrays.exp_avg[i]) << i;
        }
        if (arrays.exp_avg_sq != nullptr) {
          ASSERT_EQ(v[i], arrays.exp_avg_sq[i]) << i;
        }
      }
    }
  }
}

TEST(UpdateCodes, EveryInstructionSetEqualsTheDefinition) {
  for (const SimdKernels& kernels : available_simd_kernels()) {
    for (const UpdateCoefficients& coefficients : all_test_coefficients()) {
      for (const MasterLayout layout : kMasterLayouts) {
        for (const std::uint64_t count : {1u, 256u, 1025u, 5000u}) {
          CodedData expected(options_for(coefficients, layout, count));
          CodedData actual = expected;
          const CodedData start = expected;
          for (int step = 0; step < 2; ++step) {
            EXPECT_EQ(kernels.update(coefficients, actual.arrays()).state,
                      update_reference(coefficients, expected.arrays()));
          }
          ASSERT_EQ(actual.difference(expected), "")
              << kernels.target_name << " " << coefficients.index() << " " << count;
          EXPECT_NE(actual.difference(start), "") << "the update did nothing";
        }
      }
    }
  }
}

TEST(UpdateCodes, ThreadsAndTheFloatingPointEnvironmentChangeNothing) {
  const UpdateCoefficients coefficients = test_coefficients();
  CodedData expected(options_for(coefficients, MasterLayout::kSplitBf16, 150'000));
  const CodedData start = expected;
  update_reference(coefficients, expected.arrays());
  for (const unsigned threads : {1u, 2u, 5u}) {
    CodedData actual = start;
    CpuOptimizer optimizer(threads);
    optimizer.update(coefficients, actual.arrays());
    EXPECT_EQ(actual.difference(expected), "") << threads;
  }
#if defined(__x86_64__)
  std::vector<float> values(256, 0x1p-130f);  // denormal
  values[0] = 0x1p-128f;
  const Codes usual = encoded(CodeBook::kSigned, values);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);  // flushes denormals, and reads them as zero
  Codes flushed = encoded(CodeBook::kSigned, values);
  const std::vector<float> back = decoded(CodeBook::kSigned, flushed);
  _mm_setcsr(before);
  EXPECT_TRUE(flushed == usual);
  EXPECT_GT(bits_from_float(back[1]), 0u);
#endif
}

TEST(UpdateCodes, TheMoverLeavesTheState) {
  for (const UpdateCoefficients& coefficients : all_test_coefficients()) {
    CodedData data(options_for(coefficients, MasterLayout::kSplitBf16, 1021));
    const CodedData start = data;
    move_like_update(data.arrays(), 0);
    EXPECT_EQ(data.difference(start), "");
  }
}

TEST(UpdateCodes, MomentsThatAreNotFiniteAreNoticedAndNamed) {
  const UpdateCoefficients coefficients = adam_coefficients({}, 1e-3, 1, 1.0f);
  CodedData coded(options_for(coefficients, MasterLayout::kFp32, 1000));
  std::vector<float> gradient(1000, 1.0f);
  gradient[600] = 3e38f;  // its square overflows, its master does not
  UpdateArrays arrays = coded.arrays();
  arrays.gradient = gradient.data();
  EXPECT_EQ(update_simd(coefficients, arrays), NewState::kNonFinite);
  const NonFiniteState found = find_non_finite_state(arrays);
  EXPECT_EQ(found.element, 600u);
  EXPECT_EQ(found.part, "exp_avg_sq");
}

}  // namespace
}  // namespace sluice
