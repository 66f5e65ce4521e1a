// Stage 3 with the rank's shards at home on the device: units come together from there, with the
// bits of every other placement, and parameters do not pass through the host for it.
#include <gtest/gtest.h>

#include <algorithm>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/plan/placement.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

Config shard_config(const std::string& path, TierChoice optimizer, DType dtype = DType::kBf16) {
  Config config = sharded_config(path, 3, false, dtype);
  config.placement.parameters = TierChoice::kDevice;
  config.placement.optimizer = optimizer;
  return config;
}

void expect_the_oracle(const Config& config, const ToyOptions& options, const std::string& what) {
  expect_oracle_on_every_rank(run_ranks(options.rank_count, config, options),
                              toy_oracle(config, options), what);
}

TEST(DeviceShard, EqualsTheOracleBitForBit) {
  for (const std::uint32_t ranks : {2u, 3u, 4u}) {
    for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
      for (const TierChoice optimizer :
           {TierChoice::kNvme, TierChoice::kHost, TierChoice::kDevice}) {
        const TempDirectory directory;
        expect_the_oracle(shard_config(directory.path(), optimizer, dtype),
                          {.steps = 3, .evaluate = true, .rank_count = ranks},
                          fmt::format("{}, {} ranks", name_of(dtype), ranks));
      }
    }
  }
}

// A window that holds little more than a unit at a time, small units that stay whole, frozen ones,
// gradients that wait there, groups: what a fetch overwrites has been left, and what it gathers has
// been updated.
TEST(DeviceShard, PoliciesOrdersAndGroupsChangeNoBit) {
  for (const auto& [policy, clip] : {std::pair{OverlapPolicy::kSerial, 1.0},
                                     {OverlapPolicy::kDeferred, 1.0},
                                     {OverlapPolicy::kEager, 0.0},
                                     {OverlapPolicy::kSpeculative, 1.0}}) {
    for (const TierChoice optimizer : {TierChoice::kNvme, TierChoice::kDevice}) {
      for (const std::uint32_t group : {0u, 2u}) {
        const TempDirectory directory;
        Config config = shard_config(directory.path(), optimizer);
        config.optimizer.overlap = policy;
        config.optimizer.clip_norm = clip;
        config.placement.gradients = TierChoice::kDevice;
        config.sharding.group_ranks = group;
        config.sharding.keep_gathered_bytes = 1_KiB;
        config.memory.device_bytes = optimizer == TierChoice::kDevice ? 1'300_KiB : 600_KiB;
        const MicroBatchOrder order =
            group == 0 ? MicroBatchOrder::kHorizontal : MicroBatchOrder::kVertical;
        expect_the_oracle(config,
                          {.steps = 4,
                           .micro_batches = 2,
                           .order = order,
                           .evaluate = true,
                           .frozen_units = {2},
                           .rank_count = 4},
                          fmt::format("{}, groups of {}", name_of(policy), group));
      }
    }
  }
}

// Devices that take their time: a gather waits for those who still read its place, and for the
// update of what it gathers.
TEST(DeviceShard, DelaysChangeNoBit) {
  const ToyOptions options{.steps = 3, .micro_batches = 2, .evaluate = true, .rank_count = 2};
  const auto config_of = [](const std::string& path, std::uint64_t seed) {
    const bool is_eager = seed % 3 == 0;
    Config config = shard_config(path, seed % 2 == 0 ? TierChoice::kDevice : TierChoice::kHost);
    config.optimizer.overlap = is_eager ? OverlapPolicy::kEager : OverlapPolicy::kDeferred;
    config.optimizer.clip_norm = is_eager ? 0 : 1;
    config.memory.device_bytes = seed % 2 == 0 ? 1'300_KiB : 500_KiB;
    return config;
  };
  const ToyResult expected[] = {toy_oracle(config_of("", 0), options),
                                toy_oracle(config_of("", 1), options)};
  side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
    const TempDirectory directory;
    expect_oracle_on_every_rank(run_ranks(2, config_of(directory.path(), seed), options,
                                          {.delay_us_max = 3'000, .seed = seed}),
                                expected[seed % 3 == 0 ? 0 : 1], fmt::format("seed {}", seed));
  });
}

// Some shards are at home on the device, and what is copied there from other homes may take what is
// left of the place of a unit that a gather has evicted: it waits for the lease of that unit, too.
// In the least window units also come back so soon that a gather has to wait for the update.
TEST(DeviceShard, CopiesWaitForWhatAGatherEvicts) {
  const auto config_of = [](const std::string& path) {
    Config config = shard_config(path, TierChoice::kHost);
    config.placement.parameters = TierChoice::kAuto;
    config.memory.device_bytes = 500_KiB;
    return config;
  };
  const ToyOptions options{
      .steps = 2, .micro_batches = 2, .leases = 2, .streams = 2, .rank_count = 2};
  const ToyResult expected = toy_oracle(config_of(""), options);
  side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
    const TempDirectory directory;
    expect_oracle_on_every_rank(
        run_ranks(2, config_of(directory.path()), options, {.delay_us_max = 2'000, .seed = seed}),
        expected, fmt::format("seed {}", seed));
  });
}

// Homes as far as the budget goes, beside a window: some shards on the device, some not.
TEST(DeviceShard, AutoFillsWhatTheWindowLeaves) {
  std::ptrdiff_t most = 0;
  for (std::uint64_t device_bytes = 400_KiB; device_bytes <= 1'200_KiB; device_bytes += 100_KiB) {
    const TempDirectory directory;
    Config config = shard_config(directory.path(), TierChoice::kNvme);
    config.placement.parameters = TierChoice::kAuto;
    config.memory.device_bytes = device_bytes;
    const ToyOptions options{.steps = 2, .rank_count = 2};
    expect_the_oracle(config, options, fmt::format("{} KiB", device_bytes >> 10));
    const ModelSpec model = validated(toy_model());
    const Layout layout(model, state_format(config), config.storage.block_elements, {},
                        {.count = 2});
    const Placement placement = plan_placement(
        layout, model, config.placement, {.device_bytes = device_bytes, .host_bytes = 64_MiB});
    EXPECT_LE(placement.device_bytes(), device_bytes);
    const std::ptrdiff_t homes = std::ranges::count_if(
        layout.units(), [&](const UnitPlace& unit) { return placement.is_homed_on_device(unit); });
    EXPECT_GE(homes, most);
    most = homes;
  }
  EXPECT_EQ(most, 6) << "all of them in the end";
}

// Ranks gather in the same places: one with more memory than the others leaves it.
TEST(DeviceShard, TheLeastMemoryOfAllRanksCounts) {
  const TempDirectory directory;
  Config config = shard_config(directory.path(), TierChoice::kHost);
  config.placement.parameters = TierChoice::kAuto;
  const ToyOptions options{.steps = 2, .rank_count = 3};
  const auto runs = run_ranks(3, config, options, {.change = [](std::uint32_t rank, Config& own) {
                                own.memory.device_bytes = rank == 1 ? 600_KiB : 4_MiB;
                              }});
  expect_oracle_on_every_rank(runs, toy_oracle(config, options), "ranks with other budgets");
  for (const RankRun& run : runs) {
    EXPECT_EQ(run.device_bytes, runs[1].device_bytes);
    EXPECT_LE(run.device_bytes, 600_KiB);
  }
}

// Homes, window and slots to the byte, and a message that says how much it takes.
TEST(DeviceShard, TheSmallestBudgetNamedIsTheSmallestThatWorks) {
  const ModelSpec model = validated(toy_model());
  const Layout layout(model, StateFormat{}, 4096, {}, {.count = 2});
  for (const TierChoice optimizer : {TierChoice::kHost, TierChoice::kDevice}) {
    const auto plan = [&](std::uint64_t device_bytes) {
      return plan_placement(layout, model,
                            {.parameters = TierChoice::kDevice, .optimizer = optimizer},
                            {.device_bytes = device_bytes, .host_bytes = 64_MiB});
    };
    const std::string message = expect_error(ErrorCode::kOutOfMemory, [&] { (void)plan(1_KiB); });
    const std::string before = "the smallest that works is \"";
    const std::size_t begin = message.find(before) + before.size();
    const std::uint64_t enough =
        parse_size(message.substr(begin, message.find('"', begin) - begin));
    EXPECT_EQ(plan(enough).device_bytes(), enough);
    (void)expect_error(ErrorCode::kOutOfMemory, [&] { (void)plan(enough - 1_KiB); });
    std::uint64_t shards = 0;
    for (const UnitPlace& unit : layout.units())
      shards += align_up(layout.shard_parameter_bytes(unit.id), 4096);
    EXPECT_EQ(plan(enough).resident_parameter_bytes, shards);
    EXPECT_EQ(plan(enough).host_parameter_bytes, 0u);
  }
}

// Not for a use, and with the state on the device not for the update either. Ranks gather the same
// bytes as from any home.
TEST(DeviceShard, ParametersDoNotPassThroughTheHost) {
  std::vector<std::uint64_t> gathered;
  for (const TierChoice optimizer : {TierChoice::kDevice, TierChoice::kHost}) {
    const TempDirectory directory;
    const Config config = shard_config(directory.path(), optimizer);
    trace_enable(1 << 16);
    const auto runs = run_ranks(2, config, {.steps = 3, .micro_batches = 2, .rank_count = 2});
    const std::vector<TraceRecord> records = trace_take();
    trace_enable(0);
    const auto count = [&](TraceKind kind) {
      return std::ranges::count(records, kind, &TraceRecord::kind);
    };
    EXPECT_EQ(count(TraceKind::kCopyToDevice), 0);
    EXPECT_EQ(count(TraceKind::kCopyToHost) == 0, optimizer == TierChoice::kDevice);
    EXPECT_GT(count(TraceKind::kResident), 0);
    for (const RankRun& run : runs) {
      ASSERT_EQ(run.failure, "");
      for (const StepReport& report : run.result.reports)
        gathered.push_back(report.rank_traffic.gathered_bytes);
    }
  }
  EXPECT_EQ(std::ranges::count(gathered, gathered.front()), std::ssize(gathered));
}

}  // namespace
}  // namespace sluice::test
