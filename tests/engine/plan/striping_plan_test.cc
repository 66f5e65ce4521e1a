// The shares of drives, by bytes counted by hand: parameters, records, gradients that wait on
// storage, and shadows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include <sluice/units.h>
#include "engine/plan/placement_planner.h"
#include "engine/plan/striping.h"

namespace sluice {
namespace {

TEST(DriveDealer, DealsAsItsHeaderSays) {
  DriveDealer dealer(std::vector<double>{3, 1});
  std::vector<std::uint32_t> drives;
  for (int piece = 0; piece < 8; ++piece) drives.push_back(dealer.deal(4_MiB));
  EXPECT_EQ(drives, (std::vector<std::uint32_t>{0, 0, 1, 0, 0, 0, 1, 0}));
  EXPECT_EQ(dealer.drive_bytes(), (std::vector<std::uint64_t>{24_MiB, 8_MiB}));
}

TEST(DriveDealer, OfEqualDrivesTheFirstComesFirst) {
  DriveDealer dealer(std::vector<double>{1, 1, 1});
  std::vector<std::uint32_t> drives;
  for (int piece = 0; piece < 6; ++piece) drives.push_back(dealer.deal(1_MiB));
  EXPECT_EQ(drives, (std::vector<std::uint32_t>{0, 1, 2, 0, 1, 2}));
}

// Units of two blocks of 16,384 elements. bf16 parameters and gradients take 32 KiB per block, the
// record of a split master 2 + 4 + 4 bytes per element, 160 KiB.
constexpr std::uint64_t kPlaneBytes = 32_KiB;
constexpr std::uint64_t kRecordBytes = 160_KiB;

// Each unit has another amount on storage, so a missing term shows.
TEST(StripingPlan, CountsEverythingThatABlockHasOnStorage) {
  ModelSpec model;
  for (const char* name : {"a", "b", "c", "d", "e", "f"})
    model.units.push_back({name, {{.name = std::string(name) + ".w", .shape = {128, 256}}}});
  model = validated(model);
  const Layout layout(model, StateFormat{}, 16384);
  Placement placement = plan_placement(
      layout, model, {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme},
      {.device_bytes = 64_MiB, .host_bytes = 64_MiB});
  placement.storage_copies = 2;
  placement.gradient_tier = {Tier::kHost, Tier::kNvme, Tier::kNvme,
                             Tier::kNvme, Tier::kHost, Tier::kNvme};
  const auto home = [&](std::vector<Tier>& tiers, std::uint32_t unit, Tier tier) {
    for (std::uint32_t block = 2 * unit; block < 2 * unit + 2; ++block) tiers.at(block) = tier;
  };
  home(placement.parameter_tier, 2, Tier::kHost);  // no shadow: one plane is in memory
  home(placement.record_tier, 3, Tier::kHost);
  home(placement.parameter_tier, 4, Tier::kHost);
  home(placement.record_tier, 4, Tier::kHost);
  home(placement.parameter_tier, 5, Tier::kHost);
  home(placement.record_tier, 5, Tier::kHost);
  const std::vector<std::uint64_t> bytes_of_unit = {
      2 * (kPlaneBytes + kRecordBytes),                // home and shadow
      2 * (kPlaneBytes + kRecordBytes) + kPlaneBytes,  // and its gradient
      kRecordBytes + kPlaneBytes,
      kPlaneBytes + kPlaneBytes,
      0,
      kPlaneBytes};

  const std::vector<double> weights = {2, 1};
  const Striping striping = plan_striping(layout, placement, weights);
  ASSERT_EQ(striping.drive.size(), 12u);
  std::vector<std::uint64_t> counted(2, 0);
  double sum = 0;
  for (std::uint32_t block = 0; block < 12; ++block) {
    const std::uint64_t bytes = bytes_of_unit[block / 2];
    // The drive that is furthest behind its share gets the block: two thirds to the first drive.
    sum += static_cast<double>(bytes);
    const double first_misses = sum * 2 / 3 - static_cast<double>(counted[0]);
    const double second_misses = sum / 3 - static_cast<double>(counted[1]);
    EXPECT_EQ(striping.drive[block], second_misses > first_misses ? 1u : 0u) << "block " << block;
    counted[striping.drive[block]] += bytes;
  }
  EXPECT_EQ(striping.drive_bytes, counted);
}

}  // namespace
}  // namespace sluice
