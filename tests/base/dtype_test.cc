#include <sluice/dtype.h>

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/base/float_oracle.h"

namespace sluice {
namespace {

struct Conversion {
  SmallFloatFormat format;
  float (*decode)(std::uint16_t);
  std::uint16_t (*encode)(float);
};

const Conversion kBf16{kBf16Format, float_from_bf16, bf16_from_float};
const Conversion kFp16{kFp16Format, float_from_fp16, fp16_from_float};

std::string name_of_format(const testing::TestParamInfo<Conversion>& format) {
  return format.param.format.mantissa_bits == 7 ? "bf16" : "fp16";
}

class Conversions : public testing::TestWithParam<Conversion> {};
INSTANTIATE_TEST_SUITE_P(DType, Conversions, testing::Values(kBf16, kFp16), name_of_format);

void expect_nearest(const Conversion& conversion, float value) {
  const std::uint16_t encoded = conversion.encode(value);
  if (std::isnan(value)) {
    // Quiet, with the sign and the leading bits of the payload.
    const int shift = 23 - conversion.format.mantissa_bits;
    const std::uint32_t bits = bits_from_float(value);
    const auto payload = static_cast<std::uint16_t>((bits & 0x7fffffu) >> shift);
    const auto quiet = static_cast<std::uint16_t>(1u << (conversion.format.mantissa_bits - 1));
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    ASSERT_EQ(encoded, sign | conversion.format.infinity() | payload | quiet) << std::hex << bits;
    return;
  }
  const double expected = oracle_round(conversion.format, value, Ties::kToEven);
  ASSERT_TRUE(same_value(oracle_decode(conversion.format, encoded), expected))
      << std::hexfloat << value << " became " << oracle_decode(conversion.format, encoded)
      << " and not " << expected;
}

TEST_P(Conversions, EveryPatternDecodesToItsValue) {
  for (std::uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto encoded = static_cast<std::uint16_t>(pattern);
    const double expected = oracle_decode(GetParam().format, encoded);
    const float decoded = GetParam().decode(encoded);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(decoded)) << pattern;
    } else {
      ASSERT_TRUE(same_value(decoded, expected)) << pattern;
    }
  }
}

TEST_P(Conversions, EveryPatternComesBack) {
  const auto quiet = static_cast<std::uint16_t>(1u << (GetParam().format.mantissa_bits - 1));
  for (std::uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const auto encoded = static_cast<std::uint16_t>(pattern);
    const bool is_nan = (encoded & 0x7fffu) > GetParam().format.infinity();
    const std::uint32_t expected = is_nan ? pattern | quiet : pattern;
    ASSERT_EQ(GetParam().encode(GetParam().decode(encoded)), expected);
  }
}

TEST_P(Conversions, RoundsEveryMidpointToEvenAndItsNeighboursToTheNearest) {
  for (std::uint32_t pattern = 0; pattern < GetParam().format.infinity(); ++pattern) {
    const double low = oracle_decode(GetParam().format, static_cast<std::uint16_t>(pattern));
    double high = oracle_decode(GetParam().format, static_cast<std::uint16_t>(pattern + 1));
    if (std::isinf(high)) high = 2 * std::ldexp(1.0, std::ilogb(low));
    const auto middle = static_cast<float>((low + high) / 2);  // exact in fp32
    for (const float value :
         {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, HUGE_VALF)}) {
      expect_nearest(GetParam(), value);
      expect_nearest(GetParam(), -value);
    }
  }
}

TEST_P(Conversions, RoundsRandomPatternsToTheNearest) {
  std::mt19937 random(1);
  for (int i = 0; i < 5'000'000; ++i) {
    expect_nearest(GetParam(), float_from_bits(static_cast<std::uint32_t>(random())));
    if (HasFatalFailure()) return;
  }
}

TEST_P(Conversions, RoundsEdgesToTheNearest) {
  const std::vector<std::uint32_t> edges{
      0x00000000, 0x00000001, 0x007fffff, 0x00800000, 0x33000000,  // 2^-25: half of the least fp16
      0x33000001, 0x32ffffff, 0x387fc000, 0x387fe000, 0x387fffff, 0x38800000, 0x477fefff,
      0x477ff000,  // 65520: half-way from the largest fp16 to 65536
      0x477fffff, 0x47800000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0x7f800000,
      0x7f800001,  // NaN with only low payload bits, which truncation alone would turn to infinity
      0x7f80ffff, 0x7fbfffff, 0x7fc00000, 0x7fffffff};
  for (const std::uint32_t edge : edges) {
    expect_nearest(GetParam(), float_from_bits(edge));
    expect_nearest(GetParam(), float_from_bits(edge | 0x80000000u));
  }
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::kFp32), 4u);
  EXPECT_EQ(size_of(DType::kBf16), 2u);
  EXPECT_EQ(size_of(DType::kFp16), 2u);
  EXPECT_EQ(name_of(DType::kFp32), "fp32");
  EXPECT_EQ(name_of(DType::kBf16), "bf16");
  EXPECT_EQ(name_of(DType::kFp16), "fp16");
}

}  // namespace
}  // namespace sluice
