// Every fp32 pattern through the conversions and the split master, and enough additions for the
// norm's lazy carries. Minutes, so apart from base_test.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include <sluice/dtype.h>
#include "base/norm_accumulator.h"
#include "base/optimizer_math.h"
#include "tests/base/float_oracle.h"

namespace sluice {
namespace {

__extension__ typedef unsigned __int128 Uint128;

constexpr std::uint32_t kInfinityBits = 0x7f800000;

// Walks the non-negative fp32 values upwards beside the 16-bit ones: the nearest changes at each
// midpoint, where a tie goes to the even pattern. Returns how many values were encoded wrongly.
std::uint64_t count_wrong(SmallFloatFormat format, std::uint16_t (*encode)(float)) {
  std::vector<double> midpoints;  // [t]: between patterns t and t + 1
  for (std::uint32_t pattern = 0; pattern < format.infinity(); ++pattern) {
    const double low = oracle_decode(format, static_cast<std::uint16_t>(pattern));
    double high = oracle_decode(format, static_cast<std::uint16_t>(pattern + 1));
    if (std::isinf(high)) high = std::ldexp(1.0, format.bias() + 1);
    midpoints.push_back((low + high) / 2);
  }
  std::uint64_t wrong = 0;
  std::uint32_t nearest = 0;
  for (std::uint32_t bits = 0; bits <= kInfinityBits; ++bits) {
    const double value = float_from_bits(bits);
    while (nearest < midpoints.size() &&
           (value > midpoints[nearest] || (value == midpoints[nearest] && nearest % 2 == 1))) {
      ++nearest;
    }
    wrong += encode(float_from_bits(bits)) != nearest ? 1 : 0;
    wrong += encode(float_from_bits(bits | 0x80000000u)) != (nearest | 0x8000u) ? 1 : 0;
  }
  for (std::uint32_t bits = kInfinityBits + 1; bits < 0x80000000u; ++bits) {
    const std::uint16_t encoded = encode(float_from_bits(bits));
    const std::uint16_t negative = encode(float_from_bits(bits | 0x80000000u));
    wrong += !std::isnan(oracle_decode(format, encoded)) || encoded >= 0x8000 ? 1 : 0;
    wrong += negative != (encoded | 0x8000u) ? 1 : 0;
  }
  return wrong;
}

TEST(Exhaustive, Bf16FromFloat) {
  EXPECT_EQ(count_wrong(kBf16Format, bf16_from_float), 0u);
}

TEST(Exhaustive, Fp16FromFloat) {
  EXPECT_EQ(count_wrong(kFp16Format, fp16_from_float), 0u);
}

TEST(Exhaustive, SplitMasterComesBack) {
  std::uint64_t wrong = 0;
  std::uint32_t bits = 0;
  do {
    const SplitMaster split = split_master(float_from_bits(bits));
    const std::uint32_t joined = bits_from_float(join_master(split));
    const bool is_nan = (bits & 0x7fffffffu) > kInfinityBits;
    const bool is_high_nan = (split.high & 0x7fffu) > 0x7f80u;
    wrong += joined != (is_nan ? bits | 0x00400000u : bits) || is_nan != is_high_nan ? 1 : 0;
  } while (++bits != 0);
  EXPECT_EQ(wrong, 0u);
}

// Past the carry that falls due after 2^31 - 1 additions, with the leaf that fills a limb fastest.
TEST(Exhaustive, NormCarriesInTime) {
  constexpr std::uint64_t kAdditions = (std::uint64_t{1} << 31) + 12345;
  const double leaf = 2.0 - 0x1p-52;  // (2^53 - 1) / 2^52
  NormAccumulator total;
  for (std::uint64_t i = 0; i < kAdditions; ++i) total.add(leaf);
  const Uint128 sum = static_cast<Uint128>((std::uint64_t{1} << 53) - 1) * kAdditions;
  EXPECT_EQ(total.sum_of_squares(), std::ldexp(static_cast<double>(sum), -52));
}

}  // namespace
}  // namespace sluice
