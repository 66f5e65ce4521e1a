// The places of announced units, use by use.
#include "engine/plan/announced_uses.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "tests/engine/bound/bound_model.h"

namespace sluice::test {
namespace {

class AnnouncedUsesTest : public testing::Test {
 protected:
  AnnouncedUses make(std::uint32_t places, std::uint32_t leases) {
    model_.placement.announced_window = {.count = places, .slot_bytes = kParameterBytes};
    model_.spec.concurrent_leases = leases;
    AnnouncedUses uses(model_.spec, model_.layout, model_.placement);
    uses.begin();
    return uses;
  }
  static void add(AnnouncedUses& uses, std::vector<std::uint32_t> units) {
    std::vector<UnitId> ids;
    for (const std::uint32_t unit : units) ids.push_back(UnitId{unit});
    uses.add(ids, Pass::kForward);
  }
  // The place of each use, negative (and one less) where nothing is fetched.
  static std::vector<int> places(const AnnouncedUses& uses) {
    std::vector<int> places;
    for (const WindowUse& use : uses.window().uses) {
      const auto place = static_cast<int>(use.offset_bytes / kParameterBytes);
      places.push_back(use.fetch ? place : -1 - place);
    }
    return places;
  }

  BoundModel model_{std::vector<int>(12, 1)};
};

TEST_F(AnnouncedUsesTest, TheUnitThatComesLatestGoesFirst) {
  AnnouncedUses uses = make(3, 1);
  add(uses, {0, 1, 2});
  add(uses, {3, 0, 2, 1});
  // 1 comes latest of the three; 3 comes no more when 1 comes back.
  EXPECT_EQ(places(uses), std::vector<int>({0, 1, 2, 1, -1, -3, 1}));
  EXPECT_EQ(uses.window().uses[3].evicted_uses, std::vector<std::uint32_t>{1});
  EXPECT_EQ(uses.window().uses[6].evicted_uses, std::vector<std::uint32_t>{3});
  EXPECT_TRUE(uses.window().uses[4].evicted_uses.empty());
}

TEST_F(AnnouncedUsesTest, OfThoseThatDoNotComeTheLongestUnusedGoes) {
  AnnouncedUses uses = make(3, 1);
  add(uses, {0, 1, 2});
  add(uses, {0});
  add(uses, {3, 4});
  EXPECT_EQ(places(uses), std::vector<int>({0, 1, 2, -1, 1, 2}));
}

TEST_F(AnnouncedUsesTest, LeasedUnitsStay) {
  AnnouncedUses uses = make(2, 2);
  add(uses, {0, 1});
  add(uses, {2, 1});  // 1 is leased when 2 comes, and 0 is not
  EXPECT_EQ(places(uses), std::vector<int>({0, 1, 0, -2}));
}

TEST_F(AnnouncedUsesTest, AStepBeginsWithEmptyPlaces) {
  AnnouncedUses uses = make(3, 1);
  add(uses, {0, 1});
  uses.begin();
  add(uses, {1});
  EXPECT_EQ(places(uses), std::vector<int>({0}));
}

TEST_F(AnnouncedUsesTest, UnitsAtHomeOnTheDeviceNeedNoPlace) {
  model_.placement.parameter_tier[1] = Tier::kDevice;
  AnnouncedUses uses = make(1, 1);
  add(uses, {0, 1});
  add(uses, {0});
  EXPECT_EQ(places(uses), std::vector<int>({0, -1, -1}));
}

// Whatever comes: a unit is fetched where it is not, and a leased unit stays.
TEST_F(AnnouncedUsesTest, EachPlaceHoldsOneUnit) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const auto leases = static_cast<std::uint32_t>(1 + random() % 3);
    const auto count = static_cast<std::uint32_t>(leases + random() % 3);
    AnnouncedUses uses = make(count, leases);
    std::vector<std::uint32_t> held(count, UINT32_MAX);  // units, by place
    std::vector<std::uint32_t> last(12, UINT32_MAX);     // uses, by unit
    std::uint32_t use = 0;
    for (int announcement = 0; announcement < 8; ++announcement) {
      std::vector<std::uint32_t> units(12);
      std::iota(units.begin(), units.end(), 0u);
      std::ranges::shuffle(units, random);
      units.resize(random() % 9);
      add(uses, units);
      for (const std::uint32_t unit : units) {
        const WindowUse& planned = uses.window().uses[use];
        const std::size_t place = planned.offset_bytes / kParameterBytes;
        ASSERT_LT(place, count);
        EXPECT_EQ(planned.fetch, held[place] != unit) << seed;
        EXPECT_EQ(planned.fetch, std::ranges::count(held, unit) == 0) << seed;
        const bool evicts = planned.fetch && held[place] != UINT32_MAX;
        ASSERT_EQ(planned.evicted_uses.size(), evicts ? 1u : 0u) << seed;
        if (evicts) {
          EXPECT_EQ(planned.evicted_uses[0], last[held[place]]) << seed;
          EXPECT_LE(last[held[place]] + leases, use) << seed;
        }
        held[place] = unit;
        last[unit] = use++;
      }
    }
  }
}

}  // namespace
}  // namespace sluice::test
