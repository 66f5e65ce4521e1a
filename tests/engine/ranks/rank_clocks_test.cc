// Offsets between clocks, from exchanges whose times are known.
#include "engine/ranks/rank_clocks.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

// Rank 0's clock is the truth; the other is ahead by `offset_ns`.
struct Exchanges {
  std::vector<ExchangeTimes> own, root;

  void add(std::uint64_t own_begin, std::uint64_t own_end, std::uint64_t root_begin,
           std::uint64_t root_end, std::int64_t offset_ns) {
    const auto ahead = static_cast<std::uint64_t>(offset_ns);
    own.push_back({.before_ns = own_begin + ahead, .after_ns = own_end + ahead});
    root.push_back({.before_ns = root_begin, .after_ns = root_end});
  }
};

TEST(RankClocks, OneExchangeBoundsTheOffset) {
  Exchanges exchanges;
  exchanges.add(1000, 1100, 1010, 1090, 0);
  const ClockOffset offset = clock_offset(exchanges.own, exchanges.root);
  EXPECT_EQ(offset.offset_ns, 0);  // between -90 and 90
  EXPECT_EQ(offset.error_ns, 90u);
}

// A rank that is always the first to come, and whose messages are slow one way only.
TEST(RankClocks, LopsidedDelaysDoNotDeceive) {
  Exchanges exchanges;
  exchanges.add(0, 1000, 900, 950, 5'000'000);  // between -950 and 100 from the truth
  const ClockOffset offset = clock_offset(exchanges.own, exchanges.root);
  EXPECT_EQ(offset.offset_ns, 5'000'000 - 425);
  EXPECT_EQ(offset.error_ns, 525u);
}

// The quickest exchange counts, and two may each give one side.
TEST(RankClocks, ExchangesAddUp) {
  Exchanges exchanges;
  exchanges.add(0, 1000, 900, 1000, 77);
  exchanges.add(2900, 3000, 2000, 3000, 77);
  const ClockOffset offset = clock_offset(exchanges.own, exchanges.root);
  EXPECT_EQ(offset.offset_ns, 77);  // between -100 and 100 from the truth
  EXPECT_EQ(offset.error_ns, 100u);
}

TEST(RankClocks, TheTruthIsWithinTheError) {
  for (const std::uint64_t seed : seeds_of(campaign(1000))) {
    std::mt19937_64 random(seed);
    const auto offset_ns = static_cast<std::int64_t>(random()) >> (random() % 60);
    const auto within = [&](std::uint64_t most) { return random() % (most + 1); };
    Exchanges exchanges;
    std::uint64_t now = 1ull << 40;
    for (std::uint64_t round = within(20) + 1; round > 0; --round) {
      const std::uint64_t own_begin = now + within(5000), root_begin = now + within(5000);
      const std::uint64_t both_begun = std::max(own_begin, root_begin);
      const std::uint64_t own_end = both_begun + within(9000), root_end = both_begun + within(100);
      exchanges.add(own_begin, own_end, root_begin, root_end, offset_ns);
      now = std::max(own_end, root_end);
    }
    const ClockOffset offset = clock_offset(exchanges.own, exchanges.root);
    EXPECT_LE(std::abs(offset.offset_ns - offset_ns), static_cast<std::int64_t>(offset.error_ns))
        << "seed " << seed;
    EXPECT_LE(offset.error_ns, 15'000u);
  }
}

}  // namespace
}  // namespace sluice::test
