#include "engine/plan/placement.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

// Ten units of 64 Ki elements: 128 KiB of bf16 parameters, 640 KiB of records and 128 KiB of
// gradients each.
ModelSpec ten_units() {
  ModelSpec spec;
  for (int unit = 0; unit < 10; ++unit) {
    const std::string name = "u" + std::to_string(unit);
    spec.units.push_back({name, {{.name = name + ".w", .shape = {256, 256}}}});
  }
  return validated(spec);
}

const StateFormat kFormat{};

Placement plan(const Config::Placement& choices, const Budgets& budgets) {
  const ModelSpec spec = ten_units();
  const Layout layout(spec, kFormat, 16384);
  return plan_placement(layout, spec, choices, budgets);
}

std::string refusal_of(const Config::Placement& choices, const Budgets& budgets) {
  try {
    (void)plan(choices, budgets);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    return error.what();
  }
  return "";
}

// The size in "the smallest that works is "NKiB"".
std::uint64_t smallest_in(const std::string& message) {
  const std::string before = "the smallest that works is \"";
  const std::size_t begin = message.find(before) + before.size();
  return parse_size(message.substr(begin, message.find('"', begin) - begin));
}

TEST(Placement, EverythingInMemoryWhenBudgetsAllow) {
  const Placement placement = plan({}, {.device_bytes = 8_MiB, .host_bytes = 64_MiB});
  EXPECT_EQ(std::ranges::count(placement.parameter_tier, Tier::kDevice), 40);
  EXPECT_EQ(std::ranges::count(placement.record_tier, Tier::kHost), 40);
  EXPECT_EQ(placement.nvme_bytes(), 0u);
  EXPECT_EQ(placement.window_bytes, 0u);
  EXPECT_EQ(placement.resident_parameter_bytes, 10 * 128_KiB);
  EXPECT_EQ(placement.gradient_set_bytes, 10 * 128_KiB);
}

TEST(Placement, SmallBudgetsLeaveStateOnStorageAndKeepPoolsWithinThem) {
  const Budgets budgets{.device_bytes = 700_KiB, .host_bytes = 3_MiB};
  const Placement placement = plan({}, budgets);
  EXPECT_GT(placement.nvme_record_bytes, 0u);
  EXPECT_LE(placement.device_bytes(), budgets.device_bytes);
  EXPECT_LE(placement.host_bytes(), budgets.host_bytes);
  EXPECT_GE(placement.lanes.count, 1u);
  EXPECT_GE(placement.window_bytes, 128_KiB);
}

TEST(Placement, ParametersFillHostBeforeRecordsFromTheFirstUnitOn) {
  const Placement placement =
      plan({.parameters = TierChoice::kAuto}, {.device_bytes = 700_KiB, .host_bytes = 4_MiB});
  const auto first_nvme = std::ranges::find(placement.parameter_tier, Tier::kNvme);
  const auto any_record_in_host = std::ranges::count(placement.record_tier, Tier::kHost);
  if (first_nvme != placement.parameter_tier.end()) {
    EXPECT_EQ(any_record_in_host, 0);
  }
  bool has_ended = false;
  for (const Tier tier : placement.record_tier) {
    EXPECT_FALSE(has_ended && tier == Tier::kHost) << "host-homed records are the first ones";
    has_ended = has_ended || tier == Tier::kNvme;
  }
}

TEST(Placement, ChoicesAreObeyed) {
  const Budgets budgets{.device_bytes = 8_MiB, .host_bytes = 64_MiB};
  const Placement nvme = plan({TierChoice::kNvme, TierChoice::kNvme}, budgets);
  EXPECT_EQ(std::ranges::count(nvme.parameter_tier, Tier::kNvme), 40);
  EXPECT_EQ(std::ranges::count(nvme.record_tier, Tier::kNvme), 40);
  const Placement host = plan({TierChoice::kHost, TierChoice::kHost}, budgets);
  EXPECT_EQ(std::ranges::count(host.parameter_tier, Tier::kHost), 40);
  EXPECT_EQ(host.parameter_slots.count, 0u);
}

TEST(Placement, NvmeBytesAreWhatTheBlocksTake) {
  const Placement placement =
      plan({TierChoice::kNvme, TierChoice::kNvme}, {.device_bytes = 8_MiB, .host_bytes = 64_MiB});
  EXPECT_EQ(placement.nvme_parameter_bytes, 10 * 128_KiB);
  EXPECT_EQ(placement.nvme_record_bytes, 10 * 640_KiB);
}

// The budget that a message names must work, and one KiB less must not.
TEST(Placement, TheSmallestBudgetNamedIsTheSmallestThatWorks) {
  const Config::Placement all_choices[] = {
      {TierChoice::kAuto, TierChoice::kAuto},
      {TierChoice::kNvme, TierChoice::kNvme},
      {TierChoice::kHost, TierChoice::kNvme},
      {TierChoice::kNvme, TierChoice::kHost},
      {TierChoice::kHost, TierChoice::kHost},
      {TierChoice::kDevice, TierChoice::kAuto},
      {TierChoice::kDevice, TierChoice::kHost},
      {TierChoice::kAuto, TierChoice::kAuto, TierChoice::kHost},
      {TierChoice::kNvme, TierChoice::kNvme, TierChoice::kHost},
      {TierChoice::kHost, TierChoice::kNvme, TierChoice::kNvme},
      {TierChoice::kAuto, TierChoice::kAuto, TierChoice::kNvme},
      {TierChoice::kAuto, TierChoice::kAuto, TierChoice::kDevice},
      {TierChoice::kDevice, TierChoice::kHost, TierChoice::kDevice},
      {TierChoice::kAuto, TierChoice::kDevice}};
  for (const Config::Placement& choices : all_choices) {
    const std::uint64_t device =
        smallest_in(refusal_of(choices, {.device_bytes = 4096, .host_bytes = 64_MiB}));
    EXPECT_EQ(refusal_of(choices, {.device_bytes = device, .host_bytes = 64_MiB}), "");
    EXPECT_EQ(
        smallest_in(refusal_of(choices, {.device_bytes = device - 1_KiB, .host_bytes = 64_MiB})),
        device);
    const std::uint64_t host =
        smallest_in(refusal_of(choices, {.device_bytes = device, .host_bytes = 4096}));
    EXPECT_EQ(refusal_of(choices, {.device_bytes = device, .host_bytes = host}), "");
    EXPECT_EQ(
        smallest_in(refusal_of(choices, {.device_bytes = device, .host_bytes = host - 1_KiB})),
        host);
  }
}

// A single lane would read, update and write in turn: gradients of the last units make room.
TEST(Placement, GradientsLeaveBeforeASingleLaneServesThemAll) {
  Config::Placement choices{.parameters = TierChoice::kNvme,
                            .optimizer = TierChoice::kNvme,
                            .gradients = TierChoice::kHost};
  const std::uint64_t device =
      smallest_in(refusal_of(choices, {.device_bytes = 4096, .host_bytes = 64_MiB}));
  const std::uint64_t host =
      smallest_in(refusal_of(choices, {.device_bytes = device, .host_bytes = 4096}));
  const Budgets least{.device_bytes = device, .host_bytes = host};
  EXPECT_EQ(plan(choices, least).lanes.count, 1u);
  choices.gradients = TierChoice::kAuto;
  const Placement placement = plan(choices, least);
  EXPECT_EQ(placement.lanes.count, 4u);
  EXPECT_LE(placement.host_bytes(), host);
  EXPECT_TRUE(placement.gradients_leave());
  const auto at_home = std::ranges::count(placement.gradient_tier, Tier::kHost);
  EXPECT_GT(at_home, 0);
  EXPECT_TRUE(std::ranges::is_partitioned(placement.gradient_tier,
                                          [](Tier tier) { return tier == Tier::kHost; }));
  EXPECT_GT(placement.host_bytes() + 128_KiB, host) << "one unit's more would have fitted";
  // A config that names one lane means it.
  const ModelSpec spec = ten_units();
  const Layout layout(spec, kFormat, 16384);
  EXPECT_FALSE(plan_placement(layout, spec, choices, least, {.lanes = 1}).gradients_leave());
  // Lanes that overlap leave the gradients where they are.
  const Budgets more{.device_bytes = device, .host_bytes = host + 256_KiB};
  EXPECT_EQ(plan(choices, more).lanes.count, 2u);
  EXPECT_FALSE(plan(choices, more).gradients_leave());
}

// A hundred units of `elements` each, under a budget that does not hold all of their state.
Placement plan_of_units(const Config::Placement& choices, std::uint64_t elements,
                        std::uint64_t block_elements, const PassNeeds& pass) {
  ModelSpec spec;
  for (int unit = 0; unit < 100; ++unit) {
    const std::string name = "u" + std::to_string(unit);
    spec.units.push_back({name, {{.name = name + ".w", .shape = {elements}}}});
  }
  spec = validated(spec);
  const Layout layout(spec, kFormat, block_elements);
  // The gradients, some buffers, and half of the records.
  const std::uint64_t host_bytes = 1_MiB + 100 * align_up(elements * 10, std::uint64_t{8_KiB});
  return plan_placement(layout, spec, choices, {.device_bytes = 8_MiB, .host_bytes = host_bytes},
                        pass);
}

// Four of large blocks, and of small ones as many as hold 256 KiB of records. Homes in host memory
// get the rest.
TEST(Placement, LanesOfSmallBlocksHoldAsManyBytesAsThoseOfLargeOnes) {
  const auto lanes = [&](std::uint64_t elements, std::uint64_t block_elements, bool overlaps) {
    return plan_of_units({}, elements, block_elements, {.overlaps = overlaps}).lanes.count;
  };
  for (const bool overlaps : {false, true}) {
    EXPECT_EQ(lanes(30, 4096, overlaps), 64u) << "256 elements with their gap, 4 KiB on storage";
    EXPECT_EQ(lanes(4096, 4096, overlaps), 6u);
    EXPECT_EQ(lanes(6 << 10, 6 << 10, overlaps), 4u);
    EXPECT_EQ(lanes(16384, 16384, overlaps), 4u);
  }
  EXPECT_EQ(lanes(5 * 4096, 4096, true), 10u) << "two units";
  EXPECT_EQ(lanes(5 * 4096, 4096, false), 6u);
}

// Records that have to be on storage are read while backward computes, as many as memory holds.
TEST(Placement, HostMemoryThatIsLeftHoldsMoreLanes) {
  const Config::Placement choices{.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  const Placement most = plan_of_units(choices, 16384, 16384, {.overlaps = true});
  EXPECT_GT(most.lanes.count, 20u);
  EXPECT_LT(most.lanes.count, 100u);
  EXPECT_LE(most.host_bytes(), most.host_budget_bytes);
  const std::uint64_t lane_bytes = most.lanes.slot_bytes + most.parameter_slots.slot_bytes;
  EXPECT_GT(most.host_bytes() + lane_bytes, most.host_budget_bytes) << "one more would have fitted";
  const Placement few = plan_of_units(choices, 16384, 16384, {.overlaps = true, .lanes = 4});
  EXPECT_EQ(few.lanes.count, 4u) << "a config that names a number means it";
  EXPECT_EQ(most.parameter_slots.count - most.lanes.count,
            few.parameter_slots.count - few.lanes.count)
      << "the prefetcher keeps its slots";
  EXPECT_EQ(plan_of_units(choices, 16384, 16384, {.overlaps = false}).lanes.count, 4u)
      << "nothing is read ahead";
  EXPECT_EQ(plan_of_units(choices, 30, 4096, {.overlaps = true}).lanes.count, 100u)
      << "a lane for each block is enough";
}

// A unit's gradient drains while the next unit's backward runs, as soon as the device has room for
// both, and before the window grows.
TEST(Placement, ASecondGradientSlotComesBeforeALargerWindow) {
  const Config::Placement choices{.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  const auto on_device = [&](std::uint64_t bytes) {
    return plan(choices, {.device_bytes = bytes, .host_bytes = 64_MiB});
  };
  EXPECT_EQ(on_device(2 * 128_KiB).gradient_slots.count, 1u);
  EXPECT_EQ(on_device(3 * 128_KiB - 4_KiB).gradient_slots.count, 1u);
  EXPECT_EQ(on_device(3 * 128_KiB).gradient_slots.count, 2u);
  EXPECT_EQ(on_device(3 * 128_KiB).window_bytes, 128_KiB);
  EXPECT_EQ(on_device(64 * 128_KiB).gradient_slots.count, 2u) << "more help nobody";
}

// Beside the unit in use there is room for the two that are read ahead, and for no more: 128 KiB
// each, beside two gradient slots.
TEST(Placement, TheWindowHasRoomForTwoUnitsAhead) {
  const Config::Placement choices{.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
  const auto window = [&](std::uint64_t device_bytes) {
    return plan(choices, {.device_bytes = device_bytes, .host_bytes = 64_MiB}).window_bytes;
  };
  EXPECT_EQ(window(4 * 128_KiB), 2 * 128_KiB);
  EXPECT_EQ(window(5 * 128_KiB - 4_KiB), 3 * 128_KiB - 4_KiB);
  EXPECT_EQ(window(5 * 128_KiB), 3 * 128_KiB);
  EXPECT_EQ(window(64 * 128_KiB), 3 * 128_KiB);
}

TEST(Placement, TheTableAddsUpToTheBudgetsUse) {
  const Placement placement = plan({}, {.device_bytes = 700_KiB, .host_bytes = 3_MiB});
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::uint64_t nvme = 0;
  for (const Pool& pool : placement.pools()) {
    (pool.tier == Tier::kDevice ? device
     : pool.tier == Tier::kHost ? host
                                : nvme) += pool.size_bytes;
  }
  EXPECT_EQ(device, placement.device_bytes());
  EXPECT_EQ(host, placement.host_bytes());
  EXPECT_EQ(nvme, placement.nvme_bytes());
}

}  // namespace
}  // namespace sluice
