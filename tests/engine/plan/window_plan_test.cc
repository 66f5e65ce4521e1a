#include "engine/plan/window_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include <sluice/error.h>
#include "tests/support/campaign.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPage = 4096;

Schedule sweep(std::uint32_t units) {
  ModelSpec model;
  for (std::uint32_t unit = 0; unit < units; ++unit)
    model.units.push_back(
        {"u" + std::to_string(unit), {{.name = "w" + std::to_string(unit), .shape = {1}}}});
  return training_schedule(validated(model), 1);
}

std::uint64_t fetches(const WindowPlan& plan) {
  return static_cast<std::uint64_t>(
      std::ranges::count_if(plan.uses, [](const WindowUse& use) { return use.fetch; }));
}

// Walks the plan byte by byte (page by page): every use must find its unit whole, nothing leased
// may be overwritten, and evicted_uses must name exactly the units whose bytes go.
void check_plan(const Schedule& schedule, const std::vector<std::uint64_t>& bytes,
                std::uint64_t window_bytes, std::uint32_t leases, const WindowPlan& plan) {
  constexpr std::uint32_t kFree = UINT32_MAX;
  std::vector<std::uint32_t> owner(window_bytes / kPage, kFree);
  std::vector<std::uint32_t> last_use(bytes.size(), kFree);
  for (std::uint32_t use = 0; use < schedule.size(); ++use) {
    const std::uint32_t unit = index_of(schedule[use].unit);
    const WindowUse& planned = plan.uses[use];
    if (bytes[unit] == 0) {
      EXPECT_FALSE(planned.fetch);
      continue;
    }
    const std::uint64_t first = planned.offset_bytes / kPage;
    const std::uint64_t count = (bytes[unit] + kPage - 1) / kPage;
    ASSERT_EQ(planned.offset_bytes % kPage, 0u);
    ASSERT_LE(first + count, owner.size());
    if (planned.fetch) {
      std::vector<std::uint32_t> evicted;
      if (std::ranges::count(owner, unit) != 0) {  // it moves
        ASSERT_LE(last_use[unit] + leases, use) << "use " << use << " moves a unit that is leased";
        evicted.push_back(last_use[unit]);
        std::ranges::replace(owner, unit, kFree);
      }
      for (std::uint64_t page = first; page < first + count; ++page) {
        if (owner[page] == kFree) continue;
        const std::uint32_t victim = owner[page];
        ASSERT_LE(last_use[victim] + leases, use)
            << "use " << use << " overwrites a unit that is still leased";
        if (std::ranges::count(evicted, last_use[victim]) == 0) evicted.push_back(last_use[victim]);
        std::ranges::replace(owner, victim, kFree);
      }
      std::vector<std::uint32_t> named = planned.evicted_uses;
      std::ranges::sort(named);
      std::ranges::sort(evicted);
      EXPECT_EQ(named, evicted) << "use " << use;
      for (std::uint64_t page = first; page < first + count; ++page) owner[page] = unit;
    }
    for (std::uint64_t page = first; page < first + count; ++page)
      ASSERT_EQ(owner[page], unit) << "use " << use;
    last_use[unit] = use;
  }
}

TEST(WindowPlan, AWindowForAllFetchesEachUnitOnce) {
  const Schedule schedule = sweep(5);
  const std::vector<std::uint64_t> bytes(5, kPage);
  const WindowPlan plan = plan_window(schedule, bytes, 5 * kPage, 1);
  EXPECT_EQ(fetches(plan), 5u);
  check_plan(schedule, bytes, 5 * kPage, 1, plan);
}

TEST(WindowPlan, KeepsTheLastUnitsOverTheTurn) {
  // With 6 equal units in 3 slots, the last 3 survive from forward to backward: 6 + 3 fetches,
  // which is Belady's optimum.
  const Schedule schedule = sweep(6);
  const std::vector<std::uint64_t> bytes(6, 2 * kPage);
  const WindowPlan plan = plan_window(schedule, bytes, 6 * kPage, 1);
  EXPECT_EQ(fetches(plan), 9u);
  check_plan(schedule, bytes, 6 * kPage, 1, plan);
}

TEST(WindowPlan, OverwritesTheUnitUsedLongestAgoAmongEquals) {
  // In backward no unit behind is needed again; the one used longest ago goes, so that its
  // successor can be read ahead.
  const Schedule schedule = sweep(6);
  const WindowPlan plan = plan_window(schedule, std::vector<std::uint64_t>(6, kPage), 3 * kPage, 1);
  EXPECT_EQ(plan.uses[9].evicted_uses, std::vector<std::uint32_t>{6});
  EXPECT_EQ(plan.uses[10].evicted_uses, std::vector<std::uint32_t>{7});
}

TEST(WindowPlan, ReadsAheadRatherThanKeepingWhatIsNeededSoon) {
  // Unit 0 is needed again at the end (a tied head). With room for two, keeping it would leave one
  // place, which could be filled only when its unit has been computed; so it goes, and comes back.
  ModelSpec model;
  for (std::uint32_t unit = 0; unit < 4; ++unit)
    model.units.push_back(
        {"u" + std::to_string(unit), {{.name = "w" + std::to_string(unit), .shape = {1}}}});
  model.forward_order = {UnitId{0}, UnitId{1}, UnitId{2}, UnitId{3}, UnitId{0}};
  const Schedule schedule = inference_schedule(validated(model));
  const WindowPlan plan = plan_window(schedule, std::vector<std::uint64_t>(4, kPage), 2 * kPage, 1);
  EXPECT_EQ(plan.uses[2].evicted_uses, std::vector<std::uint32_t>{0});
  EXPECT_EQ(plan.uses[3].evicted_uses, std::vector<std::uint32_t>{1});
  EXPECT_EQ(fetches(plan), 5u);
}

TEST(WindowPlan, DeviceHomedUnitsNeverFetch) {
  const Schedule schedule = sweep(3);
  const std::vector<std::uint64_t> bytes{0, kPage, kPage};
  const WindowPlan plan = plan_window(schedule, bytes, kPage, 1);
  EXPECT_FALSE(plan.uses[0].fetch);
  check_plan(schedule, bytes, kPage, 1, plan);
}

TEST(WindowPlan, TooSmallAWindowIsAnError) {
  const std::vector<std::uint64_t> bytes(3, kPage);
  EXPECT_THROW((void)plan_window(sweep(3), bytes, kPage - 1, 1), Error);
  EXPECT_THROW((void)plan_window(sweep(3), bytes, kPage, 2), Error);
  EXPECT_NO_THROW((void)plan_window(sweep(3), bytes, 2 * kPage, 2));
}

TEST(WindowPlan, MinimumWindowIsTheLargestSumOfConsecutiveDistinctUnits) {
  const Schedule schedule = sweep(3);  // 0 1 2 2 1 0
  const std::vector<std::uint64_t> bytes{kPage, 5 * kPage, 3 * kPage};
  EXPECT_EQ(leased_bytes_max(schedule, bytes, 1), 5 * kPage);
  EXPECT_EQ(leased_bytes_max(schedule, bytes, 2), 8 * kPage);
  EXPECT_EQ(leased_bytes_max(schedule, bytes, 3), 9 * kPage);
}

// Random sizes, some of them none, in any order or up and down as a step goes.
struct RandomCase {
  std::vector<std::uint64_t> bytes;
  Schedule schedule;
  std::uint32_t leases = 1;

  explicit RandomCase(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    leases = 1 + static_cast<std::uint32_t>(random() % 4);
    bytes.resize(1 + random() % 9);
    const std::uint64_t most_pages = random() % 2 == 0 ? 6 : 60;
    for (std::uint64_t& size : bytes)
      size = random() % 5 == 0 ? 0 : 1 + random() % (most_pages * kPage);
    if (random() % 2 == 0) {
      for (int use = 0; use < 40; ++use)
        schedule.push_back({.unit = UnitId{static_cast<std::uint32_t>(random() % bytes.size())}});
      return;
    }
    ModelSpec model;
    for (std::uint32_t unit = 0; unit < bytes.size(); ++unit) {
      model.units.push_back(
          {"u" + std::to_string(unit), {{.name = "w" + std::to_string(unit), .shape = {1}}}});
      model.forward_order.push_back(UnitId{unit});
    }
    if (random() % 2 == 0) model.forward_order.push_back(UnitId{0});  // a tied head
    schedule = training_schedule(
        validated(model), 1 + static_cast<std::uint32_t>(random() % 3),
        random() % 2 == 0 ? MicroBatchOrder::kHorizontal : MicroBatchOrder::kVertical);
  }

  bool works(std::uint64_t window_bytes) const {
    try {
      (void)plan_window(schedule, bytes, window_bytes, leases);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
      return false;
    }
    return true;
  }
};

// At the least window, at 20 larger ones, and not below what is held at once. The least is more
// than that with three leases and more alone, and rarely.
TEST(WindowPlan, EveryWindowFromTheLeastOnKeepsEveryInvariant) {
  const test::Campaign seeds = test::campaign(300);
  std::uint64_t larger = 0;
  for (const std::uint64_t seed : test::seeds_of(seeds)) {
    const RandomCase of(seed);
    const std::uint64_t least = least_window_bytes(of.schedule, of.bytes, of.leases);
    const std::uint64_t held = leased_bytes_max(of.schedule, of.bytes, of.leases);
    ASSERT_GE(least, held) << "seed " << seed;
    if (of.leases <= 2) {
      EXPECT_EQ(least, held) << "seed " << seed;
    }
    larger += least > held ? 1 : 0;
    if (held != 0) {
      EXPECT_FALSE(of.works(held - kPage)) << "seed " << seed;
    }
    std::mt19937_64 random(seed);
    for (int larger_window = 0; larger_window <= 20; ++larger_window) {
      const std::uint64_t window =
          least + (larger_window == 0 ? 0 : random() % (std::uint64_t{3} * least + kPage));
      ASSERT_TRUE(of.works(window)) << "seed " << seed << ": " << window << " of " << least;
      check_plan(of.schedule, of.bytes, window / kPage * kPage, of.leases,
                 plan_window(of.schedule, of.bytes, window, of.leases));
      if (HasFatalFailure()) FAIL() << "seed " << seed << ", window of " << window;
    }
  }
  EXPECT_LE(larger * 10, seeds.cases) << "with three leases and more the least is seldom more";
}

// A large unit, small ones and larger ones in a row, and the first again at the end: between the
// least window and 144 pages the holes that the rule leaves are too small for the third use.
TEST(WindowPlan, TwoLeasesFindRoomInEveryWindowFromTheLeastOn) {
  const std::uint64_t mib = 1 << 20;
  ModelSpec model;
  std::vector<std::uint64_t> bytes{16 * mib, mib / 8};
  bytes.insert(bytes.end(), 6, 24 * mib + 26 * 1024);
  bytes.push_back(4096);
  for (std::uint32_t unit = 0; unit < bytes.size(); ++unit) {
    model.units.push_back(
        {"u" + std::to_string(unit), {{.name = "w" + std::to_string(unit), .shape = {1}}}});
    model.forward_order.push_back(UnitId{unit});
  }
  model.forward_order.push_back(UnitId{0});
  const Schedule schedule = training_schedule(validated(model), 1);
  const std::uint64_t least = least_window_bytes(schedule, bytes, 2);
  EXPECT_EQ(least, 2 * (24 * mib + 28 * 1024));
  std::uint64_t fetches_before = UINT64_MAX;
  for (std::uint64_t window = least; window <= 200 * mib; window += mib) {
    const WindowPlan plan = plan_window(schedule, bytes, window, 2);
    check_plan(schedule, bytes, window / kPage * kPage, 2, plan);
    fetches_before = std::min(fetches_before, fetches(plan));
  }
  EXPECT_EQ(fetches_before, 9u) << "the largest window fetches each unit once";
}

}  // namespace
}  // namespace sluice
