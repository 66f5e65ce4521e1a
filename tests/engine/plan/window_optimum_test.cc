// How many fetches window plans make: never fewer than the best of all plans, which small cases
// tell by trying them all, and seldom more. With units of one size never more than keeping the most
// recently used would; with others that one, which moves units for nothing, wins a case now and
// then.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "engine/plan/window_plan.h"
#include "tests/support/campaign.h"

namespace sluice {
namespace {

constexpr std::uint64_t kOptimumPage = 4096;
constexpr std::size_t kUnits = 5;
constexpr int kAbsent = -1;

struct Case {
  std::array<int, kUnits> pages{};  // of each unit
  std::vector<std::uint32_t> uses;
  int window = 0;  // pages
  std::uint32_t leases = 1;

  Case(const std::array<int, kUnits>& unit_pages, std::vector<std::uint32_t> used, int window_pages,
       std::uint32_t lease_count)
      : pages(unit_pages), uses(std::move(used)), window(window_pages), leases(lease_count) {}
  Case(std::uint64_t seed, bool are_equal) {
    std::mt19937_64 random(seed);
    const int size = 1 + static_cast<int>(random() % 2);
    for (int& count : pages) count = are_equal ? size : 1 + static_cast<int>(random() % 3);
    leases = 1 + static_cast<std::uint32_t>(random() % 2);
    const std::uint64_t units = 2 + random() % (kUnits - 1);
    const std::uint64_t count = 6 + random() % 7;
    for (std::uint64_t use = 0; use < count; ++use)
      uses.push_back(static_cast<std::uint32_t>(random() % units));
    window = static_cast<int>(leased_bytes_max(schedule(), bytes(), leases) / kOptimumPage) +
             static_cast<int>(random() % 4);
  }

  Schedule schedule() const {
    Schedule schedule;
    for (const std::uint32_t unit : uses) schedule.push_back({.unit = UnitId{unit}});
    return schedule;
  }
  std::vector<std::uint64_t> bytes() const {
    std::vector<std::uint64_t> bytes;
    for (const int count : pages) bytes.push_back(static_cast<std::uint64_t>(count) * kOptimumPage);
    return bytes;
  }
  // Whether use `use` finds the unit held.
  bool is_held(std::uint32_t unit, std::size_t use) const {
    for (std::size_t back = 1; back < leases && back <= use; ++back)
      if (uses[use - back] == unit) return true;
    return false;
  }
};

int planned_fetches(const Case& of) {
  const WindowPlan plan = plan_window(
      of.schedule(), of.bytes(), static_cast<std::uint64_t>(of.window) * kOptimumPage, of.leases);
  return static_cast<int>(
      std::ranges::count_if(plan.uses, [](const WindowUse& use) { return use.fetch; }));
}

// Every way to place every unit.
int least_fetches(const Case& of) {
  using Places = std::array<int, kUnits>;  // the first page of each unit, or kAbsent
  Places nobody;
  nobody.fill(kAbsent);
  std::map<Places, int> best{{nobody, 0}};
  for (std::size_t use = 0; use < of.uses.size(); ++use) {
    const std::uint32_t unit = of.uses[use];
    std::map<Places, int> next;
    const auto reach = [&](const Places& places, int fetches) {
      const auto [known, is_new] = next.emplace(places, fetches);
      if (!is_new) known->second = std::min(known->second, fetches);
    };
    for (const auto& [places, fetches] : best) {
      if (places[unit] != kAbsent) reach(places, fetches);
      if (of.is_held(unit, use)) continue;
      for (int begin = 0; begin + of.pages[unit] <= of.window; ++begin) {
        Places after = places;
        after[unit] = begin;
        bool is_free = true;
        for (std::uint32_t other = 0; other < kUnits; ++other) {
          if (other == unit || places[other] == kAbsent ||
              places[other] >= begin + of.pages[unit] || begin >= places[other] + of.pages[other])
            continue;
          is_free = is_free && !of.is_held(other, use);
          after[other] = kAbsent;
        }
        if (is_free) reach(after, fetches + 1);
      }
    }
    best = std::move(next);
  }
  int least = INT_MAX;
  for (const auto& [places, fetches] : best) least = std::min(least, fetches);
  return least;
}

// The unit that was used longest ago goes, until the rest fits: as if units could be moved for
// nothing.
int least_recently_used_fetches(const Case& of) {
  std::vector<std::uint32_t> recent;  // the latest last
  int fetches = 0;
  for (const std::uint32_t unit : of.uses) {
    if (std::erase(recent, unit) == 0) {
      ++fetches;
      const auto pages = [&] {
        int sum = of.pages[unit];
        for (const std::uint32_t other : recent) sum += of.pages[other];
        return sum;
      };
      while (pages() > of.window) recent.erase(recent.begin());
    }
    recent.push_back(unit);
  }
  return fetches;
}

struct Totals {
  int planned = 0, least = 0, recently_used = 0;
};

// 20,000 cases of either kind were 3.5 and 3.7 % above the least.
constexpr int kPercentAboveTheLeast = 8;

Totals run(bool are_equal) {
  Totals totals;
  for (const std::uint64_t seed : test::seeds_of(test::campaign(200))) {
    const Case of(seed, are_equal);
    const int planned = planned_fetches(of);
    const int least = least_fetches(of);
    const int recently_used = least_recently_used_fetches(of);
    EXPECT_GE(planned, least) << "seed " << seed;
    if (are_equal) {
      EXPECT_LE(planned, recently_used) << "seed " << seed;
    }
    totals.planned += planned;
    totals.least += least;
    totals.recently_used += recently_used;
  }
  return totals;
}

// With places that begin where units begin and end alone, it would be six.
TEST(WindowFetches, APlaceMayEndWhereAUnitBegins) {
  const Case of({5, 4, 1, 3}, {3, 1, 0, 1, 1, 3, 2, 2, 1}, /*window=*/9, /*leases=*/2);
  EXPECT_EQ(planned_fetches(of), 5);
  EXPECT_EQ(least_fetches(of), 5);
}

TEST(WindowFetches, OfUnitsOfOneSize) {
  const Totals totals = run(/*are_equal=*/true);
  EXPECT_LE(totals.planned * 100, totals.least * (100 + kPercentAboveTheLeast));
  EXPECT_LT(totals.planned, totals.recently_used);
}

TEST(WindowFetches, OfUnitsOfAnySize) {
  const Totals totals = run(/*are_equal=*/false);
  EXPECT_LE(totals.planned * 100, totals.least * (100 + kPercentAboveTheLeast));
}

}  // namespace
}  // namespace sluice
