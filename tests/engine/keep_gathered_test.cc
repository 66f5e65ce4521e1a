// sharding.keep_gathered: at stage 3, units of at most so many bytes stay whole on every rank's
// device. The same bits, and the memory and gathers of stage 2 for exactly these units.
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/units.h"
#include "engine/placement.h"
#include "tests/engine/rank_threads.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// Of the toy's units in bf16, keeps the embedding, h.0 and the scale, but not h.1 to h.3.
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

TEST(KeepGathered, EqualsTheOracleBitForBit) {
  for (const std::uint32_t ranks : {2u, 3u}) {
    for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
      for (const bool uses_nvme : {false, true}) {
        for (const std::uint64_t keep : {kSome, kAll}) {
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
      Config config = keeping_config(directory.path(), kSome, true);
      config.optimizer.overlap = policy;
      config.optimizer.clip_norm = clip;
      config.sharding.group_ranks = group;
      config.memory.device_bytes = 300_KiB;
      const ToyOptions options{.steps = 3, .micro_batches = 2, .rank_count = 4};
      expect_oracle_on_every_rank(run_ranks(4, config, options), toy_oracle(config, options),
                                  std::string(name_of(policy)) + (group == 0 ? "" : " groups"));
    }
  }
}

// A kept unit that is frozen is gathered with its values, and never again.
TEST(KeepGathered, FrozenUnitsStayAsTheyAre) {
  const ModelSpec model = toy_model();
  for (const std::uint64_t keep : {kSome, kAll}) {
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

// Kept units are gathered once a step, after their update; the others at every use, less what the
// window still holds: h.3 from forward to backward, h.1 from one micro-batch to the next.
TEST(KeepGathered, TrafficIsThatOfTheFormula) {
  const ModelSpec model = toy_model();
  const std::uint64_t kept = unit_bytes(model, 0) + unit_bytes(model, 1) + unit_bytes(model, 5);
  const std::uint64_t others = unit_bytes(model, 2) + unit_bytes(model, 3) + unit_bytes(model, 4);
  for (const std::uint64_t keep : {kSome, kAll}) {
    for (const std::uint32_t micro_batches : {1u, 3u}) {
      for (const MicroBatchOrder order :
           {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
        const TempDirectory directory;
        Config config = keeping_config(directory.path(), keep, false);
        config.optimizer.overlap = OverlapPolicy::kSerial;  // each step's gathers end in it
        // kSome: the kept units, the largest of the others, and two gradients.
        config.memory.device_bytes = keep == kSome ? 264_KiB : 2_MiB;
        const auto runs = run_ranks(2, config,
                                    {.steps = 3,
                                     .micro_batches = micro_batches,
                                     .order = order,
                                     .evaluate = keep == kAll,
                                     .rank_count = 2});
        const std::uint64_t passes = order == MicroBatchOrder::kVertical ? 1 : micro_batches;
        const std::uint64_t at_uses =
            passes * (2 * others - unit_bytes(model, 4)) - (passes - 1) * unit_bytes(model, 2);
        const std::uint64_t gathered = keep == kSome ? kept + at_uses : kept + others;
        const std::uint64_t reduced =
            micro_batches * (kept + others + unit_bytes(model, 0));  // unit 0 twice
        for (const RankRun& run : runs) {
          ASSERT_EQ(run.failure, "");
          for (const StepReport& report : run.result.reports) {
            EXPECT_EQ(report.rank_traffic.gathered_bytes, gathered) << keep << micro_batches;
            EXPECT_EQ(report.rank_traffic.reduced_bytes, reduced) << keep << micro_batches;
          }
        }
      }
    }
  }
}

// --- Memory, as a pure function ---

struct Plan {
  Layout layout;
  Placement placement;
};

Plan plan_of(const Shard& shard, std::uint64_t device_bytes, std::uint32_t leases = 1) {
  ModelSpec spec = toy_model();
  spec.concurrent_leases = leases;
  const ModelSpec model = validated(spec);
  const Layout layout(model, StateFormat{}, 4096, {}, shard);
  return {layout,
          plan_placement(layout, model, {}, {.device_bytes = device_bytes, .host_bytes = 64_MiB})};
}

std::vector<bool> kept_units(const Plan& plan) {
  std::vector<bool> kept;
  for (const UnitPlace& unit : plan.layout.units())
    kept.push_back(plan.placement.unit_is_on_device(unit));
  return kept;
}

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

// Keeping gives way to what a step cannot do without, and never makes a budget too small.
TEST(KeepGathered, KeepsWhatFitsBesideTheLeastWindow) {
  for (const std::uint32_t leases : {1u, 2u}) {
    std::uint64_t least_bytes = 4096;
    const auto fits = [&](std::uint64_t keep, std::uint64_t device_bytes) {
      try {
        const Plan plan = plan_of({.count = 2, .keep_gathered_bytes = keep}, device_bytes, leases);
        EXPECT_LE(plan.placement.device_bytes(), device_bytes);
        return true;
      } catch (const Error&) {
        return false;
      }
    };
    while (!fits(0, least_bytes)) least_bytes += 4096;
    for (const std::uint64_t keep : {kSome, kAll}) {
      EXPECT_FALSE(fits(keep, least_bytes - 4096));
      std::uint64_t kept_bytes = 0;
      for (std::uint64_t budget = least_bytes; budget < 1_MiB; budget += 4096) {
        ASSERT_TRUE(fits(keep, budget)) << budget;
        const Plan plan = plan_of({.count = 2, .keep_gathered_bytes = keep}, budget, leases);
        kept_bytes = std::max(kept_bytes, plan.placement.resident_parameter_bytes);
      }
      EXPECT_EQ(kept_bytes, plan_of({.count = 2, .keep_gathered_bytes = keep}, 4_MiB, leases)
                                .placement.resident_parameter_bytes);
    }
  }
  // The embedding and the scale, but not h.0, fit beside the largest unit and a gradient.
  EXPECT_EQ(kept_units(plan_of({.count = 2, .keep_gathered_bytes = kSome}, 184_KiB)),
            std::vector<bool>({true, false, false, false, false, true}));
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
