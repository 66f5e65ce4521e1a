// Against counting nanosecond by nanosecond.
#include "tools/trace/interval_set.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

TEST(IntervalSet, AnswersAsCountingDoes) {
  const Campaign cases = campaign(200);
  for (std::uint64_t seed = cases.first_seed; seed < cases.first_seed + cases.cases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    std::array<int, 100> count{};
    IntervalSet set(IntervalSet::For::kDepth);
    IntervalSet busy_set;
    for (std::uint64_t i = random() % 12; i-- > 0;) {
      const std::uint64_t begin = random() % 100, end = random() % 101;
      set.add(begin, end);
      busy_set.add(begin, end);
      for (std::uint64_t at = begin; at < end; ++at) ++count[at];
    }
    set.seal();
    busy_set.seal();
    const std::uint64_t begin = random() % 100, end = begin + random() % (101 - begin);
    std::uint64_t busy = 0, sum = 0;
    for (std::uint64_t at = begin; at < end; ++at) {
      busy += count[at] != 0 ? 1 : 0;
      sum += static_cast<std::uint64_t>(count[at]);
    }
    EXPECT_EQ(set.busy_ns(begin, end), busy);
    EXPECT_EQ(busy_set.busy_ns(begin, end), busy);
    if (end == begin) continue;
    const auto length = static_cast<double>(end - begin);
    EXPECT_DOUBLE_EQ(set.share(begin, end), static_cast<double>(busy) / length);
    EXPECT_NEAR(set.depth(begin, end), static_cast<double>(sum) / length, 1e-12);
  }
}

}  // namespace
}  // namespace sluice::test
