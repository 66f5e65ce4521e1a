#include "base/norm_accumulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace sluice {
namespace {

// A sum as a string of binary digits, one a byte, added with pencil and paper. Digit i has the
// weight 2^(i - 400).
class BinarySum {
 public:
  void add(double leaf) {
    int exponent = 0;
    const double fraction = std::frexp(leaf, &exponent);
    auto mantissa = static_cast<std::uint64_t>(std::ldexp(fraction, 53));
    std::size_t place = static_cast<std::size_t>(exponent - 53 + 400);
    int carried = 0;
    for (; mantissa != 0 || carried != 0; mantissa >>= 1, ++place) {
      const int sum = digits_.at(place) + static_cast<int>(mantissa & 1) + carried;
      digits_.at(place) = static_cast<std::uint8_t>(sum & 1);
      carried = sum >> 1;
    }
  }

  // To the nearest double, ties to even.
  double rounded() const {
    std::size_t top = digits_.size();
    while (top > 0 && digits_[top - 1] == 0) --top;
    if (top == 0) return 0.0;
    const std::size_t bottom = top > 53 ? top - 53 : 0;
    std::uint64_t mantissa = 0;
    for (std::size_t i = top; i > bottom; --i) mantissa = mantissa * 2 + digits_[i - 1];
    if (bottom > 0 && digits_[bottom - 1] == 1) {
      const bool more =
          std::any_of(digits_.begin(), digits_.begin() + static_cast<std::ptrdiff_t>(bottom) - 1,
                      [](std::uint8_t digit) { return digit == 1; });
      if (more || mantissa % 2 == 1) ++mantissa;
    }
    return std::ldexp(static_cast<double>(mantissa), static_cast<int>(bottom) - 400);
  }

 private:
  std::vector<std::uint8_t> digits_ = std::vector<std::uint8_t>(900);
};

double total_of(const std::vector<double>& leaves) {
  NormAccumulator total;
  for (const double leaf : leaves) total.add(leaf);
  EXPECT_TRUE(total.finite());
  return total.sum_of_squares();
}

double oracle_of(const std::vector<double>& leaves) {
  BinarySum sum;
  for (const double leaf : leaves) {
    if (leaf != 0.0) sum.add(leaf);
  }
  return sum.rounded();
}

// Sums of squares of fp32 values between 2^low and 2^high.
std::vector<double> random_leaves(std::size_t count, int low, int high, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<double> leaves(count);
  for (double& leaf : leaves) {
    const int terms = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < terms; ++i) {
      const int exponent = low + static_cast<int>(random() % static_cast<unsigned>(high - low));
      const auto value = std::ldexp(1.0f + static_cast<float>(random() >> 9) * 0x1p-23f, exponent);
      leaf += static_cast<double>(value) * static_cast<double>(value);
    }
  }
  return leaves;
}

TEST(NormAccumulator, NothingSumsToZero) {
  EXPECT_EQ(total_of({}), 0.0);
  EXPECT_EQ(total_of({0.0, -0.0}), 0.0);
}

TEST(NormAccumulator, OneLeafComesBack) {
  for (const double leaf : random_leaves(10000, -148, 128, 1)) {
    NormAccumulator total;
    total.add(leaf);
    ASSERT_EQ(total.sum_of_squares(), leaf);
  }
}

TEST(NormAccumulator, EqualsPencilAndPaper) {
  for (std::uint32_t seed = 0; seed < 40; ++seed) {
    for (const auto& [low, high] :
         {std::pair{-3, 3}, {-30, 5}, {-148, 127}, {-148, -120}, {100, 127}}) {
      const auto leaves = random_leaves(1 + 37 * seed, low, high, 100 + seed);
      ASSERT_EQ(total_of(leaves), oracle_of(leaves)) << seed << " " << low;
    }
  }
}

TEST(NormAccumulator, OrderDoesNotMatter) {
  std::vector<double> leaves = random_leaves(20000, -148, 127, 5);
  const double expected = total_of(leaves);
  std::mt19937 random(6);
  for (int i = 0; i < 20; ++i) {
    std::shuffle(leaves.begin(), leaves.end(), random);
    ASSERT_EQ(total_of(leaves), expected);
  }
  // The same in plain fp64 does depend on the order, or this test would prove nothing.
  std::sort(leaves.begin(), leaves.end());
  double upwards = 0;
  for (const double leaf : leaves) upwards += leaf;
  double downwards = 0;
  for (auto leaf = leaves.rbegin(); leaf != leaves.rend(); ++leaf) downwards += *leaf;
  EXPECT_NE(upwards, downwards);
}

TEST(NormAccumulator, PartsMergeToTheWhole) {
  const std::vector<double> leaves = random_leaves(10000, -148, 127, 7);
  const double expected = oracle_of(leaves);
  for (const std::size_t parts : {1u, 2u, 3u, 7u, 64u}) {
    std::vector<NormAccumulator> partial(parts);
    for (std::size_t i = 0; i < leaves.size(); ++i) partial[(i * 31) % parts].add(leaves[i]);
    NormAccumulator forward;
    for (const NormAccumulator& part : partial) forward.merge(part);
    ASSERT_EQ(forward.sum_of_squares(), expected);
    NormAccumulator backward;
    for (auto part = partial.rbegin(); part != partial.rend(); ++part) backward.merge(*part);
    ASSERT_EQ(backward.sum_of_squares(), expected);
  }
}

NormAccumulator::Words added(const std::vector<NormAccumulator>& parts) {
  NormAccumulator::Words sum{};
  for (const NormAccumulator& part : parts)
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += part.words()[i];
  return sum;
}

TEST(NormAccumulator, WordsAddUpToTheWhole) {
  const std::vector<double> leaves = random_leaves(10000, -148, 127, 7);
  const double expected = oracle_of(leaves);
  for (const std::size_t parts : {1u, 3u, 304u, 5000u}) {
    std::vector<NormAccumulator> partial(parts);
    for (std::size_t i = 0; i < leaves.size(); ++i) partial[(i * 31) % parts].add(leaves[i]);
    const NormAccumulator whole = NormAccumulator::of_words(added(partial));
    ASSERT_EQ(whole.sum_of_squares(), expected) << parts;
    EXPECT_EQ(whole.words(), added({whole}));
    partial.back().add(std::numeric_limits<double>::infinity());
    EXPECT_FALSE(NormAccumulator::of_words(added(partial)).finite()) << parts;
  }
}

TEST(NormAccumulator, MergingWithItselfDoubles) {
  NormAccumulator total;
  total.add(3.0);
  for (int i = 0; i < 40; ++i) total.merge(total);
  EXPECT_EQ(total.sum_of_squares(), std::ldexp(3.0, 40));
  total.add(1.0);
  EXPECT_EQ(total.sum_of_squares(), std::ldexp(3.0, 40) + 1.0);
}

TEST(NormAccumulator, ReadingLeavesTheTotalAsItWas) {
  NormAccumulator total;
  total.add(1.0);
  EXPECT_EQ(total.sum_of_squares(), 1.0);
  total.add(0x1p-60);
  EXPECT_EQ(total.sum_of_squares(), 1.0);
  total.add(0x1p-53);
  EXPECT_EQ(total.sum_of_squares(), 1.0 + 0x1p-52);
}

TEST(NormAccumulator, TiesRoundToEvenAndTheLeastBitBeyondBreaksThem) {
  const double next = 1.0 + 0x1p-52;
  EXPECT_EQ(total_of({1.0, 0x1p-53}), 1.0);
  EXPECT_EQ(total_of({next, 0x1p-53}), 1.0 + 0x1p-51);
  EXPECT_EQ(total_of({1.0, 0x1p-53, 0x1p-298}), next);
  EXPECT_EQ(total_of({next, 0x1p-54, 0x1p-55}), next);
  EXPECT_EQ(total_of({0x1p264, 0x1p211}), 0x1p264);
  EXPECT_EQ(total_of({0x1p264, 0x1p211, 0x1p-298}), std::nextafter(0x1p264, INFINITY));
  // 2^53 ones below a bit: the carry runs through every digit.
  EXPECT_EQ(total_of({2.0 - 0x1p-52, 0x1p-53}), 2.0);
}

TEST(NormAccumulator, CarriesRunAcrossEveryLimb) {
  std::vector<double> leaves;
  for (int exponent = -298; exponent < 329; ++exponent) leaves.push_back(std::ldexp(1.0, exponent));
  EXPECT_EQ(total_of(leaves), 0x1p329);  // rounded up from 2^329 - 2^-298
  leaves.push_back(0x1p-298);
  EXPECT_EQ(total_of(leaves), 0x1p329);
}

TEST(NormAccumulator, HoldsSquaresOfTheSmallestAndLargestFloats) {
  const double least = static_cast<double>(std::numeric_limits<float>::denorm_min());
  const double most = static_cast<double>(std::numeric_limits<float>::max());
  EXPECT_EQ(total_of({least * least}), 0x1p-298);
  EXPECT_EQ(total_of(std::vector<double>(1000, least * least)), 1000 * 0x1p-298);
  EXPECT_EQ(total_of({most * most, least * least}), most * most);
  const std::vector<double> leaves(1 << 20, 256 * most * most);
  EXPECT_EQ(total_of(leaves), 0x1p28 * most * most);
}

TEST(NormAccumulator, RemembersWhatIsNotFinite) {
  for (const double leaf :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    NormAccumulator total;
    total.add(1.0);
    EXPECT_TRUE(total.finite());
    total.add(leaf);
    total.add(1.0);
    EXPECT_FALSE(total.finite());
    EXPECT_TRUE(std::isnan(total.sum_of_squares()));
    NormAccumulator whole;
    whole.add(2.0);
    whole.merge(total);
    EXPECT_FALSE(whole.finite());
    EXPECT_TRUE(std::isnan(whole.sum_of_squares()));
  }
}

TEST(NormAccumulatorDeathTest, RefusesWhatIsNoSumOfSquares) {
  NormAccumulator total;
  EXPECT_DEATH(total.add(-1.0), "sum of squares");
  EXPECT_DEATH(total.add(0x1p-299), "sum of squares");
  EXPECT_DEATH(total.add(0x1p330), "sum of squares");
}

}  // namespace
}  // namespace sluice
