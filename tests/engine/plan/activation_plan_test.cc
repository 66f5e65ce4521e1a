// The plan of boundary activations, replayed against rules of its own: who is in which place, what
// is at home, what is held.
#include "engine/plan/activation_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <tuple>

#include "tests/support/campaign.h"

namespace sluice {
namespace {

ModelSpec chain(std::uint32_t units, std::uint64_t boundary_bytes, std::uint32_t leases = 1) {
  ModelSpec model;
  for (std::uint32_t i = 0; i < units; ++i) {
    const std::string name = "u" + std::to_string(i);
    model.units.push_back({.name = name, .tensors = {{.name = name + ".w", .shape = {8}}}});
  }
  model.concurrent_leases = leases;
  model.boundary_bytes.assign(units - 1, boundary_bytes);
  return validated(model);
}

using Key = std::tuple<std::uint32_t, std::uint32_t, ActivationKind>;

Key key_of(const ActivationRef& ref) {
  return {ref.boundary, ref.micro_batch, ref.kind};
}

// Walks through the plan as the device would; reports each broken rule as a failure.
void replay(const ActivationPlan& plan, std::uint32_t held_max) {
  struct Place {
    Key holds{};
    std::uint32_t last_access = 0;
    bool is_used = false;
  };
  std::vector<Place> places(plan.places);
  std::map<Key, std::uint32_t> saved;  // by what: the access
  for (std::uint32_t i = 0; i < plan.accesses.size(); ++i) {
    const ActivationAccess& access = plan.accesses[i];
    ASSERT_LT(access.place, plan.places);
    Place& place = places[access.place];
    const Key key = key_of(access.ref);
    if (access.action == ActivationAction::kSave) {
      saved[key] = i;
    } else {
      ASSERT_TRUE(saved.contains(key)) << "access " << i << " loads what nobody has saved";
    }
    EXPECT_EQ(access.source, saved.at(key));
    const bool is_there = place.is_used && place.holds == key;
    if (access.action == ActivationAction::kLoad) {
      EXPECT_EQ(access.moves, !is_there) << "access " << i;
      EXPECT_TRUE(!access.moves || plan.accesses[access.source].moves) << "never went home";
    }
    const bool overwrites = access.action == ActivationAction::kSave || access.moves;
    EXPECT_EQ(access.evicted.has_value(), overwrites && place.is_used) << "access " << i;
    if (access.evicted) {
      EXPECT_EQ(*access.evicted, place.last_access);
      EXPECT_LE(place.last_access + held_max, i) << "still held";
    }
    place = {.holds = key, .last_access = i, .is_used = true};
  }
}

TEST(ActivationPlan, TheSequenceIsThatOfTheSchedule) {
  const ModelSpec model = chain(3, 100);
  const ActivationPlan plan = plan_activations({.model = model, .micro_batches = 2}, 0);
  std::string text;
  for (const ActivationAccess& access : plan.accesses) {
    text += access.action == ActivationAction::kSave ? 's' : 'l';
    text += access.ref.kind == ActivationKind::kValue ? 'v' : 'g';
    text +=
        std::to_string(access.ref.boundary) + "." + std::to_string(access.ref.micro_batch) + " ";
  }
  EXPECT_EQ(text,
            "sv0.0 lv0.0 sv1.0 lv1.0 lv1.0 sg1.0 lv0.0 lg1.0 sg0.0 lg0.0 "
            "sv0.1 lv0.1 sv1.1 lv1.1 lv1.1 sg1.1 lv0.1 lg1.1 sg0.1 lg0.1 ");
  const ActivationPlan vertical = plan_activations(
      {.model = model, .micro_batches = 2, .order = MicroBatchOrder::kVertical}, 0);
  text.clear();
  for (const ActivationAccess& access : vertical.accesses)
    text +=
        std::to_string(access.ref.boundary) + "." + std::to_string(access.ref.micro_batch) + " ";
  EXPECT_EQ(text,
            "0.0 0.1 0.0 1.0 0.1 1.1 1.0 1.1 1.0 1.0 1.1 1.1 0.0 1.0 0.0 0.1 1.1 0.1 0.0 0.1 ");
}

// By hand: six units, window of five places. Values 0..4 fill it; backward needs a place for each
// gradient while the value before is loaded, so value 0 gives way and comes back at the end.
TEST(ActivationPlan, WhatIsWantedLastGivesWay) {
  const ModelSpec model = chain(6, 5000);
  const ActivationPlan plan = plan_activations({.model = model}, 5);
  std::string moved;
  for (const ActivationAccess& access : plan.accesses) {
    if (access.moves)
      moved += (access.action == ActivationAction::kSave ? "out" : "in") +
               std::to_string(access.ref.boundary) + " ";
  }
  EXPECT_EQ(moved, "out0 in0 ");
  EXPECT_EQ(plan.stored_bytes, 8192u);
  EXPECT_EQ(plan.fetched_bytes, 8192u);
}

TEST(ActivationPlan, InferenceNeedsTwoPlacesAndMovesNothing) {
  const ModelSpec model = chain(40, 100);
  const ActivationPlan plan =
      plan_activations({.model = model, .has_backward = false}, activations_held_max(model));
  EXPECT_EQ(plan.stored_bytes + plan.fetched_bytes, 0u);
  EXPECT_LE(plan.places, 3u);
}

TEST(ActivationPlan, RandomPlansKeepTheRules) {
  for (const std::uint64_t seed : test::seeds_of(test::campaign(300))) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto draw = [&](std::uint32_t low, std::uint32_t high) {
      return std::uniform_int_distribution<std::uint32_t>(low, high)(random);
    };
    const ModelSpec model = chain(draw(2, 12), draw(1, 20000), draw(1, 3));
    const ActivationShape shape{
        .model = model,
        .micro_batches = draw(1, 6),
        .order = draw(0, 1) == 0 ? MicroBatchOrder::kHorizontal : MicroBatchOrder::kVertical,
        .has_backward = draw(0, 4) != 0};
    const std::uint32_t held = activations_held_max(model);
    const ActivationPlan whole = plan_activations(shape, 0);
    replay(whole, held);
    EXPECT_EQ(whole.stored_bytes + whole.fetched_bytes, 0u) << "with places for all, nothing moves";
    // With as many places as that, it is the same plan; with fewer, something moves at last.
    const ActivationPlan again = plan_activations(shape, whole.places);
    EXPECT_EQ(again.stored_bytes, 0u);
    EXPECT_EQ(again.places, whole.places);
    const std::uint32_t places = draw(held, std::max(held, whole.places));
    const ActivationPlan bounded = plan_activations(shape, places);
    EXPECT_LE(bounded.places, places);
    replay(bounded, held);
    EXPECT_GE(bounded.fetched_bytes, bounded.stored_bytes);
  }
}

TEST(ActivationHomes, AreApartAndShareTheHomeOfTheirValue) {
  ModelSpec model = chain(4, 1);
  model.boundary_bytes = {5000, 1, 4096};
  const ActivationHomes homes(
      model,
      {.home = ActivationHome::kHost, .micro_batches = 2, .order = MicroBatchOrder::kVertical});
  ASSERT_EQ(homes.count(), 6u);
  EXPECT_EQ(homes.size_bytes(), 2u * (8192 + 4096 + 4096));
  EXPECT_EQ(homes.largest_bytes(), 8192u);
  EXPECT_EQ(homes.home_of({.boundary = 1, .micro_batch = 1}), 3u);
  EXPECT_EQ(homes.home_of({.boundary = 1, .micro_batch = 1, .kind = ActivationKind::kGradient}),
            3u);
  EXPECT_EQ(homes.offset_bytes(3), 2u * 8192 + 4096);
  EXPECT_EQ(homes.value_bytes(3), 1u);
  EXPECT_EQ(index_of(homes.unit(3)), 1u);
  EXPECT_EQ(homes.micro_batch(3), 1u);
  EXPECT_TRUE(homes.hold(2, MicroBatchOrder::kVertical));
  EXPECT_FALSE(homes.hold(3, MicroBatchOrder::kVertical));
  EXPECT_TRUE(homes.hold(9, MicroBatchOrder::kHorizontal));
  const ActivationHomes one(model, {.home = ActivationHome::kHost, .micro_batches = 5});
  EXPECT_EQ(one.count(), 3u) << "horizontal micro-batches follow one another";
  EXPECT_EQ(one.home_of({.boundary = 2, .micro_batch = 4}), 2u);
}

}  // namespace
}  // namespace sluice
