// The quick search for places in the window finds those of the plain one, and looks at few places
// per use, however many units there are.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "engine/plan/window_plan.h"
#include "tests/engine/plan/plain_window_plan.h"
#include "tests/support/campaign.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kSearchPage = 4096;

Schedule random_schedule(std::mt19937_64& random, std::uint32_t units) {
  Schedule schedule;
  for (std::uint64_t sweep = 1 + random() % 4; sweep > 0; --sweep) {
    const bool is_up = random() % 2 == 0;
    for (std::uint32_t unit = 0; unit < units; ++unit)
      if (random() % 8 != 0) schedule.push_back({.unit = UnitId{is_up ? unit : units - 1 - unit}});
    for (std::uint64_t extra = random() % 4; extra > 0; --extra)
      schedule.push_back({.unit = UnitId{static_cast<std::uint32_t>(random() % units)}});
  }
  return schedule;
}

void expect_the_plain_plan(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto units = static_cast<std::uint32_t>(2 + random() % 14);
  const std::uint64_t largest = 1 + random() % 5;
  std::vector<std::uint64_t> bytes;
  for (std::uint32_t unit = 0; unit < units; ++unit)
    bytes.push_back(random() % 10 == 0 ? 0 : 1 + random() % (largest * kSearchPage));
  const Schedule schedule = random_schedule(random, units);
  if (schedule.empty()) return;
  const auto leases = static_cast<std::uint32_t>(1 + random() % 3);
  const std::uint64_t window =
      least_window_bytes(schedule, bytes, leases) + random() % (units * largest * kSearchPage);
  const auto expected = PlainWindowPlan(schedule, bytes, window, leases).uses();
  if (!expected) return;  // a plan with a retreat
  const WindowPlan plan = plan_window(schedule, bytes, window, leases);
  ASSERT_EQ(plan.uses.size(), expected->size());
  for (std::size_t use = 0; use < plan.uses.size(); ++use) {
    const WindowUse& own = plan.uses[use];
    const WindowUse& plain = (*expected)[use];
    ASSERT_EQ(own.fetch, plain.fetch) << "use " << use << ", seed " << seed;
    ASSERT_EQ(own.offset_bytes, plain.offset_bytes) << "use " << use << ", seed " << seed;
    ASSERT_EQ(own.evicted_uses, plain.evicted_uses) << "use " << use << ", seed " << seed;
  }
}

TEST(WindowSearch, FindsThePlacesOfThePlainSearch) {
  for (const std::uint64_t seed : seeds_of(campaign(2000))) {
    expect_the_plain_plan(seed);
    if (testing::Test::HasFailure()) return;
  }
}

Schedule there_and_back(std::uint32_t units) {
  Schedule schedule;
  for (std::uint32_t unit = 0; unit < units; ++unit) schedule.push_back({.unit = UnitId{unit}});
  for (std::uint32_t unit = units; unit-- > 0;) schedule.push_back({.unit = UnitId{unit}});
  return schedule;
}

TEST(WindowSearch, LooksAtAFewPlacesPerUse) {
  for (const std::uint32_t units : {1000u, 16000u}) {
    const Schedule schedule = there_and_back(units);
    for (const std::uint64_t largest : {std::uint64_t{1}, std::uint64_t{3}}) {
      std::vector<std::uint64_t> bytes;
      for (std::uint32_t unit = 0; unit < units; ++unit)
        bytes.push_back((1 + unit % largest) * kSearchPage);
      for (const std::uint64_t window_pages : {std::uint64_t{largest + 1}, std::uint64_t{200},
                                               std::uint64_t{units / 2}, units * largest}) {
        for (const std::uint32_t leases : {1u, 2u}) {
          if (leases == 2 && window_pages < 2 * largest) continue;
          const WindowPlan plan = plan_window(schedule, bytes, window_pages * kSearchPage, leases);
          EXPECT_LE(plan.places_judged, 40 * schedule.size())
              << units << " units of up to " << largest << " pages in a window of " << window_pages;
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice::test
