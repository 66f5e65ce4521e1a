#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/optimizer_math.h"
#include "tests/base/float_oracle.h"

namespace sluice {
namespace {

// Every bit back (a signalling NaN quiet), `high` the nearest bf16, ties away from zero.
void expect_split_and_join(std::uint32_t bits) {
  const float master = float_from_bits(bits);
  const SplitMaster split = split_master(master);
  const std::uint32_t joined = bits_from_float(join_master(split));
  const double high = oracle_decode(kBf16Format, split.high);
  ASSERT_EQ(std::isnan(high), std::isnan(master)) << std::hex << bits;
  if (std::isnan(master)) {
    ASSERT_EQ(joined, bits | 0x00400000u) << std::hex << bits;
    return;
  }
  ASSERT_EQ(joined, bits) << std::hex << bits;
  ASSERT_TRUE(same_value(high, oracle_round(kBf16Format, master, Ties::kAwayFromZero)))
      << std::hex << bits;
}

TEST(SplitMaster, ExampleOfTheHeader) {
  const SplitMaster split = split_master(float_from_bits(0x3f808000));
  EXPECT_EQ(split.high, 0x3f81);
  EXPECT_EQ(split.low, -0x8000);
  EXPECT_EQ(bits_from_float(join_master(split)), 0x3f808000u);
}

TEST(SplitMaster, LargeFiniteMastersHaveAnInfiniteHighAndComeBack) {
  EXPECT_EQ(split_master(float_from_bits(0x7f7f7fff)).high, 0x7f7f);
  EXPECT_EQ(split_master(float_from_bits(0x7f7f8000)).high, 0x7f80);
  EXPECT_EQ(split_master(float_from_bits(0xff7fffff)).high, 0xff80);
  for (std::uint32_t bits = 0x7f7f0000; bits <= 0x7f800000; ++bits) {
    expect_split_and_join(bits);
    expect_split_and_join(bits | 0x80000000u);
  }
}

TEST(SplitMaster, EdgesOfEveryExponent) {
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      expect_split_and_join(high << 16 | low);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(SplitMaster, RandomPatterns) {
  std::mt19937 random(2);
  for (int i = 0; i < 10'000'000; ++i) {
    expect_split_and_join(static_cast<std::uint32_t>(random()));
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace sluice
