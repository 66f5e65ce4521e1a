#include "io/checksum.h"

#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

// XXH3 with 64 bits and seed 0: the published test vector of the empty input, and sums that xxHash
// gives without any vector instructions, so that no processor may choose other ones.
TEST(Checksum, IsXxh3) {
  EXPECT_EQ(checksum({}), 0x2d06800538d394c2u);
  std::vector<std::byte> data(1000003);
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<std::byte>((i * 2654435761u & 0xffffffffu) >> 24);
  EXPECT_EQ(checksum(std::span(data).first(4096)), 0x9bf67f8deff876aeu);
  EXPECT_EQ(checksum(data), 0xeabdff429d7374f7u);
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
