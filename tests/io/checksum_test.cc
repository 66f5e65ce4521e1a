#include "io/checksum.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

// The published test vector of XXH3 with 64 bits and seed 0: the empty input.
TEST(Checksum, IsXxh3) {
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);
}

TEST(Checksum, EverySingleBitCounts) {
  const Campaign campaign = test::campaign(2000);
  std::mt19937_64 random(campaign.first_seed);
  std::vector<std::byte> data(16384);
  for (std::byte& byte : data) byte = static_cast<std::byte>(random());
  const std::uint64_t clean = checksum(data);
  for (std::uint64_t i = 0; i < campaign.cases; ++i) {
    const std::uint64_t bit = random() % (data.size() * 8);
    const auto mask = static_cast<std::byte>(1u << bit % 8);
    data[bit / 8] ^= mask;
    EXPECT_NE(checksum(data), clean) << "bit " << bit;
    data[bit / 8] ^= mask;
  }
  EXPECT_EQ(checksum(data), clean);
}

}  // namespace
}  // namespace sluice::test
