// Hybrid sharding, with ranks as threads: groups that share a copy of the state each.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "tests/engine/ranks/rank_threads.h"

namespace sluice::test {
namespace {

// Groups of ranks with a copy of the state each: the bits are those of the order of addition, for
// every stage alike. Six ranks make three groups, whose order shows in fp32, or groups of three,
// which pad; groups of one are copies without sharing.
TEST(HybridSharding, EqualsTheOracleBitForBit) {
  for (const auto& [ranks, group] : {std::pair{4u, 2u}, {6u, 2u}, {6u, 3u}, {4u, 1u}}) {
    for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
      for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
        for (const bool uses_nvme : {false, true}) {
          if ((ranks != 4 || group != 2) && (dtype != DType::kFp32 || !uses_nvme)) continue;
          const TempDirectory directory;
          Config config = sharded_config(directory.path(), stage, uses_nvme, dtype);
          config.sharding.group_ranks = group;
          const ToyOptions options{.steps = 3, .evaluate = true, .rank_count = ranks};
          expect_oracle_on_every_rank(run_ranks(ranks, config, options),
                                      toy_oracle(config, options),
                                      fmt::format("{} ranks in groups of {}, stage {} {} {}", ranks,
                                                  group, stage, name_of(dtype), uses_nvme));
        }
      }
    }
  }
}

TEST(HybridSharding, OrderOfAdditionIsTheGroups) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, false, DType::kFp32);
  const ToyOptions options{.steps = 1, .rank_count = 4};
  const StateBytes all = toy_oracle(config, options).state;
  config.sharding.group_ranks = 2;
  EXPECT_TRUE(toy_oracle(config, options).state != all) << "the cases above show nothing";
}

TEST(HybridSharding, MicroBatchesAndPoliciesChangeNoBit) {
  for (const std::uint32_t stage : {0u, 1u, 3u}) {
    for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative}) {
      for (const MicroBatchOrder order :
           {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
        const TempDirectory directory;
        Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
        config.optimizer.overlap = policy;
        config.sharding.group_ranks = 2;
        ToyOptions options{.steps = 2, .micro_batches = 3, .order = order, .rank_count = 4};
        options.reduces_each = stage >= 2 || order == MicroBatchOrder::kVertical;
        expect_oracle_on_every_rank(run_ranks(4, config, options), toy_oracle(config, options),
                                    fmt::format("stage {} {}", stage, name_of(policy)));
      }
    }
  }
}

// Four ranks in groups of two: of each gradient a rank's half crosses, in fp32 out and in bf16
// back.
TEST(HybridSharding, TrafficIsThatOfTheFormula) {
  const ModelSpec model = validated(toy_model());
  std::uint64_t reduced_elements = 0;
  for (const UnitId unit : model.backward_order)
    for (const TensorSpec& tensor : model.units[index_of(unit)].tensors)
      reduced_elements += tensor.element_count();
  for (std::uint32_t stage = 0; stage <= 3; ++stage) {
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, false, DType::kBf16);
    config.sharding.group_ranks = 2;
    for (const RankRun& run : run_ranks(4, config, {.steps = 2, .rank_count = 4})) {
      ASSERT_EQ(run.failure, "");
      const RankTraffic traffic = run.result.reports[1].rank_traffic;
      EXPECT_EQ(traffic.reduced_bytes, reduced_elements * 2);
      // A unit with an odd number of elements is rounded down.
      EXPECT_NEAR(static_cast<double>(traffic.crossed_bytes),
                  static_cast<double>(reduced_elements * (4 + 2)) / 2, 16);
    }
  }
}

// Ranks in groups open more sequences than others, which would wait for them.
TEST(HybridSharding, RanksInDifferentGroupsAreToldAtOnce) {
  const auto failures = [](const auto& change) {
    const TempDirectory directory;
    const Config config = sharded_config(directory.path(), 3, false, DType::kBf16);
    const RankConditions conditions{.timeout_s = 5, .change = change};
    std::vector<std::string> all;
    for (const RankRun& run : run_ranks(4, config, {.steps = 1, .rank_count = 4}, conditions))
      all.push_back(run.failure);
    return all;
  };
  const auto groups = failures(
      [](std::uint32_t rank, Config& config) { config.sharding.group_ranks = rank == 2 ? 2 : 0; });
  const auto nodes = failures([](std::uint32_t rank, Config& config) {
    if (rank != 2) return;
    config.sharding.reduction = RankReduction::kNodes;
    config.sharding.node_ranks = 2;
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(groups[rank],
              fmt::format("rank {} of 4: sharding.group is 2 on one rank and 4 on another; start "
                          "every rank with the same config and model",
                          rank));
    EXPECT_NE(nodes[rank].find("is 0 on one rank and 2 on another"), std::string::npos)
        << nodes[rank];
  }
}

TEST(HybridSharding, GroupsThatDoNotDivideTheRanksAreRefused) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, false, DType::kBf16);
  config.sharding.group_ranks = 2;
  for (const RankRun& run : run_ranks(3, config, {.steps = 1}))
    EXPECT_NE(run.failure.find("sharding.group is 2"), std::string::npos) << run.failure;
}

}  // namespace
}  // namespace sluice::test
