// sharding.keep_gathered: at stage 3, units of at most so many bytes stay whole on every rank's
// device. The same bits, and the memory and gathers of stage 2 for exactly these units.
#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/placement.h"
#include "engine/plan/window_plan.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// Bounds for the toy's units in bf16: the embedding and the scale; h.0 as well; and h.1 to h.3.
constexpr std::uint64_t kFew = 35'000;
constexpr std::uint64_t kSome = 40'000;
constexpr std::uint64_t kAll = 1_MiB;

std::uint64_t unit_bytes(const ModelSpec& model, std::size_t unit) {
  std::uint64_t bytes = 0;
  for (const TensorSpec& tensor : model.units[unit].tensors)
    bytes += size_of(DType::kBf16) * tensor.element_count();
  return bytes;
}

Config keeping_config(const std::string& path, std::uint64_t keep_gathered_bytes, bool uses_nvme,
                      DType dtype = DType::kBf16) {
  Config config = sharded_config(path, 3, uses_nvme, dtype);
  config.sharding.keep_gathered_bytes = keep_gathered_bytes;
  return config;
}

struct Plan {
  Layout layout;
  Placement placement;
};

Plan plan_of(const Shard& shard, std::uint64_t device_bytes, std::uint32_t leases = 1) {
  ModelSpec spec = toy_model();
  spec.concurrent_leases = leases;
  const ModelSpec model = validated(spec);
  const Layout layout(model, StateFormat{}, 4096, {}, shard);
  return {layout, plan_placement(layout, model, {.parameters = TierChoice::kHost},
                                 {.device_bytes = device_bytes, .host_bytes = 64_MiB})};
}

std::vector<bool> kept_units(const Plan& plan) {
  std::vector<bool> kept;
  for (const UnitPlace& unit : plan.layout.units())
    kept.push_back(plan.placement.unit_is_on_device(unit));
  return kept;
}

// The bytes of h.0 to h.3 that the window's plan fetches where these are not kept.
std::uint64_t fetched_bytes(std::uint32_t micro_batches, MicroBatchOrder order) {
  const Plan plan = plan_of({.count = 2, .keep_gathered_bytes = kFew}, 64_MiB);
  const ModelSpec model = validated(toy_model());
  const Schedule schedule = training_schedule(model, micro_batches, order);
  const WindowPlan window = plan_window(schedule, window_unit_bytes(plan.layout, plan.placement),
                                        plan.placement.window_bytes, 1);
  std::uint64_t bytes = 0;
  for (std::size_t use = 0; use < schedule.size(); ++use)
    if (window.uses[use].fetch) bytes += unit_bytes(model, index_of(schedule[use].unit));
  const std::uint64_t once =
      unit_bytes(model, 1) + unit_bytes(model, 2) + unit_bytes(model, 3) + unit_bytes(model, 4);
  EXPECT_GT(bytes, once);
  EXPECT_LE(bytes, 2 * micro_batches * once);
  return bytes;
}

TEST(KeepGathered, EqualsTheOracleBitForBit) {
  for (const std::uint32_t ranks : {2u, 3u}) {
    for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
      for (const bool uses_nvme : {false, true}) {
        for (const std::uint64_t keep : {kFew, kAll}) {
          const TempDirectory directory;
          const Config config = keeping_config(
              directory.path(), keep * size_of(dtype) / size_of(DType::kBf16), uses_nvme, dtype);
          const ToyOptions options{.steps = 3, .evaluate = true, .rank_count = ranks};
          expect_oracle_on_every_rank(run_ranks(ranks, config, options),
                                      toy_oracle(config, options),
                                      std::string(name_of(dtype)) + (uses_nvme ? " nvme" : ""));
        }
      }
    }
  }
}

TEST(KeepGathered, PoliciesMicroBatchesAndGroupsChangeNoBit) {
  for (const auto& [policy, clip] : {std::pair{OverlapPolicy::kSerial, 1.0},
                                     {OverlapPolicy::kDeferred, 1.0},
                                     {OverlapPolicy::kEager, 0.0},
                                     {OverlapPolicy::kSpeculative, 1.0}}) {
    for (const std::uint32_t group : {0u, 2u}) {
      const TempDirectory directory;
      Config config = keeping_config(directory.path(), kFew, true);
      config.optimizer.overlap = policy;
      config.optimizer.clip_norm = clip;
      config.sharding.group_ranks = group;
      config.memory.device_bytes = 500_KiB;
      const ToyOptions options{.steps = 3, .micro_batches = 2, .rank_count = 4};
      expect_oracle_on_every_rank(run_ranks(4, config, options), toy_oracle(config, options),
                                  std::string(name_of(policy)) + (group == 0 ? "" : " groups"));
    }
  }
}

// A kept unit that is frozen is gathered with its values, and never again.
TEST(KeepGathered, FrozenUnitsStayAsTheyAre) {
  const ModelSpec model = toy_model();
  for (const std::uint64_t keep : {kFew, kAll}) {
    const TempDirectory directory;
    Config config = keeping_config(directory.path(), keep, true);
    config.optimizer.overlap = OverlapPolicy::kSerial;
    const ToyOptions options{.steps = 3, .evaluate = true, .frozen_units = {1, 2}, .rank_count = 3};
    const auto runs = run_ranks(3, config, options);
    expect_oracle_on_every_rank(runs, toy_oracle(config, options), "frozen");
    if (keep != kAll) continue;
    std::uint64_t trained = 0;
    for (const std::size_t unit : {0u, 3u, 4u, 5u}) trained += unit_bytes(model, unit);
    for (const StepReport& report : runs[0].result.reports)
      EXPECT_EQ(report.rank_traffic.gathered_bytes, trained);
  }
}

// Kept units are gathered once a step, after their update, and the others at every use for which
// the window does not hold them.
TEST(KeepGathered, TrafficIsThatOfTheFormula) {
  const ModelSpec model = validated(toy_model());
  const auto sum_of = [&](std::initializer_list<std::size_t> units) {
    std::uint64_t bytes = 0;
    for (const std::size_t unit : units) bytes += unit_bytes(model, unit);
    return bytes;
  };
  const std::uint64_t all = sum_of({0, 1, 2, 3, 4, 5});
  for (const std::uint64_t keep : {kFew, kSome, kAll}) {
    for (const std::uint32_t micro_batches : {1u, 3u}) {
      for (const MicroBatchOrder order :
           {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
        const TempDirectory directory;
        Config config = keeping_config(directory.path(), keep, false);
        config.optimizer.overlap = OverlapPolicy::kSerial;  // each step's gathers end in it
        const auto runs = run_ranks(2, config,
                                    {.steps = 3,
                                     .micro_batches = micro_batches,
                                     .order = order,
                                     .evaluate = keep == kAll,
                                     .rank_count = 2});
        // h.1 to h.3 fit the window of three units and stay; h.0 as well does not.
        const std::uint64_t gathered =
            keep == kFew ? sum_of({0, 5}) + fetched_bytes(micro_batches, order) : all;
        for (const RankRun& run : runs) {
          ASSERT_EQ(run.failure, "");
          for (const StepReport& report : run.result.reports) {
            EXPECT_EQ(report.rank_traffic.gathered_bytes, gathered) << keep << micro_batches;
            EXPECT_EQ(report.rank_traffic.reduced_bytes, micro_batches * (all + sum_of({0})));
          }
        }
      }
    }
  }
}

// --- Memory, as a pure function ---

TEST(KeepGathered, MemoryIsThatOfTheUnits) {
  const Plan plain = plan_of({.count = 2}, 4_MiB);
  EXPECT_EQ(plain.placement.resident_parameter_bytes, 0u);
  const Plan some = plan_of({.count = 2, .keep_gathered_bytes = kSome}, 4_MiB);
  EXPECT_EQ(kept_units(some), std::vector<bool>({true, true, false, false, false, true}));
  std::uint64_t kept_bytes = 0;
  std::uint64_t kept_shard_bytes = 0;
  std::uint64_t window_bytes = 0;
  for (const UnitPlace& unit : some.layout.units()) {
    const std::uint64_t whole = align_up(some.layout.unit_parameter_bytes(unit.id), 4096);
    if (!some.placement.unit_is_on_device(unit)) {
      window_bytes += whole;
      continue;
    }
    kept_bytes += whole;
    for (const BlockPlace& block : some.layout.blocks_of(unit.id))
      kept_shard_bytes += some.layout.parameter_slot_bytes(block.id);
  }
  EXPECT_EQ(some.placement.resident_parameter_bytes, kept_bytes);
  EXPECT_EQ(some.placement.window_bytes, window_bytes);  // all of the three others
  // The rank's shards of these units have left host memory.
  EXPECT_EQ(some.placement.host_parameter_bytes,
            plain.placement.host_parameter_bytes - kept_shard_bytes);
  const Plan all = plan_of({.count = 2, .keep_gathered_bytes = kAll}, 4_MiB);
  const Plan stage2 = plan_of({.count = 2, .keeps_all_parameters = true}, 4_MiB);
  EXPECT_EQ(all.placement.device_bytes(), stage2.placement.device_bytes());
  EXPECT_EQ(all.placement.host_bytes(), stage2.placement.host_bytes());
  EXPECT_EQ(all.placement.window_bytes, 0u);
}

// The limit is the unit's own bytes, whatever the number of ranks pads them to.
TEST(KeepGathered, LimitIsInclusiveAndWithoutPadding) {
  const std::uint64_t h0_bytes = unit_bytes(toy_model(), 1);
  for (const std::uint32_t ranks : {2u, 3u, 4u}) {
    const auto keeps_h0 = [&](std::uint64_t keep) -> bool {
      return kept_units(plan_of({.count = ranks, .keep_gathered_bytes = keep}, 4_MiB))[1];
    };
    EXPECT_TRUE(keeps_h0(h0_bytes));
    EXPECT_FALSE(keeps_h0(h0_bytes - 1));
  }
}

// The window comes first, so keeping never makes a budget too small.
TEST(KeepGathered, KeepsWhatFitsBesideTheWindow) {
  const auto kept = [](std::uint64_t device_bytes) {
    return plan_of({.count = 2, .keep_gathered_bytes = kSome}, device_bytes);
  };
  const Plan plain = plan_of({.count = 2}, 4_MiB);
  const std::uint64_t slot_bytes = plain.placement.gradient_slots.slot_bytes;
  const std::uint64_t wanted_bytes = plain.placement.window_bytes + 2 * slot_bytes;
  const auto bytes_of = [&](std::uint32_t unit) {
    return align_up(plain.layout.unit_parameter_bytes(UnitId{unit}), 4096);
  };
  EXPECT_EQ(kept_units(kept(wanted_bytes)), std::vector<bool>(6, false));
  EXPECT_EQ(kept_units(kept(wanted_bytes + bytes_of(0) - 1)), std::vector<bool>(6, false));
  const Plan one = kept(wanted_bytes + bytes_of(0));
  EXPECT_EQ(kept_units(one), std::vector<bool>({true, false, false, false, false, false}));
  const Plan two = kept(wanted_bytes + bytes_of(0) + bytes_of(1));
  EXPECT_EQ(kept_units(two), std::vector<bool>({true, true, false, false, false, false}));
  for (std::uint64_t budget = 184_KiB; budget < 1_MiB; budget += 4096) {
    EXPECT_LE(kept(budget).placement.device_bytes(), budget);
    EXPECT_GE(kept(budget).placement.window_bytes,
              std::min(plan_of({.count = 2}, budget).placement.window_bytes,
                       kept(4_MiB).placement.window_bytes));
  }
}

TEST(KeepGathered, MeansNothingToOneRank) {
  const Plan plain = plan_of({}, 300_KiB);
  const Plan keeping = plan_of({.keep_gathered_bytes = kAll}, 300_KiB);
  EXPECT_EQ(kept_units(keeping), kept_units(plain));
  EXPECT_EQ(keeping.placement.window_bytes, plain.placement.window_bytes);
}

// "auto" takes room for speculation where nothing but kept units lacks a shadow.
TEST(KeepGathered, KeptUnitsDoNotStopSpeculation) {
  for (const std::uint64_t keep : {std::uint64_t{0}, kSome, kAll}) {
    const TempDirectory directory;
    const Config config = keeping_config(directory.path(), keep, true);
    for (const RankRun& run : run_ranks(2, config, {.steps = 1, .rank_count = 2})) {
      ASSERT_EQ(run.failure, "");
      EXPECT_EQ(run.shadow_bytes != 0, keep != kAll);
    }
  }
}

}  // namespace
}  // namespace sluice::test
