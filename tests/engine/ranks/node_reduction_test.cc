// sharding.reduction "nodes", with ranks as threads.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "tests/engine/ranks/rank_threads.h"

namespace sluice::test {
namespace {

Config nodes_of(std::uint32_t ranks, Config config) {
  config.sharding.reduction = RankReduction::kNodes;
  config.sharding.node_ranks = ranks;
  return config;
}

// The bits are those of the order of addition, for every stage alike.
TEST(NodeReduction, EqualsTheOracleBitForBit) {
  for (const auto& [ranks, node] : {std::pair{4u, 2u}, {6u, 2u}, {6u, 3u}}) {
    for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
      for (const DType dtype : {DType::kBf16, DType::kFp32}) {
        if (ranks != 4 && dtype != DType::kFp32) continue;
        const TempDirectory directory;
        Config config = nodes_of(node, sharded_config(directory.path(), stage, true, dtype));
        if (stage == 3 && node == 3) config.sharding.keep_gathered_bytes = 0;
        const ToyOptions options{.steps = 3, .evaluate = true, .rank_count = ranks};
        expect_oracle_on_every_rank(run_ranks(ranks, config, options), toy_oracle(config, options),
                                    fmt::format("{} ranks in nodes of {}, stage {} {}", ranks, node,
                                                stage, name_of(dtype)));
      }
    }
  }
}

TEST(NodeReduction, OrderOfAdditionIsTheNodes) {
  const TempDirectory directory;
  const Config config = sharded_config(directory.path(), 3, false, DType::kFp32);
  const ToyOptions options{.steps = 1, .rank_count = 4};
  EXPECT_TRUE(toy_oracle(config, options).state != toy_oracle(nodes_of(2, config), options).state)
      << "the cases above show nothing";
}

TEST(NodeReduction, MicroBatchesAndPoliciesChangeNoBit) {
  for (const std::uint32_t stage : {0u, 3u}) {
    for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative}) {
      for (const MicroBatchOrder order :
           {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
        const TempDirectory directory;
        Config config = nodes_of(2, sharded_config(directory.path(), stage, true, DType::kBf16));
        config.optimizer.overlap = policy;
        ToyOptions options{.steps = 2, .micro_batches = 3, .order = order, .rank_count = 4};
        options.reduces_each = stage >= 2 || order == MicroBatchOrder::kVertical;
        expect_oracle_on_every_rank(run_ranks(4, config, options), toy_oracle(config, options),
                                    fmt::format("stage {} {}", stage, name_of(policy)));
      }
    }
  }
}

// A rank's part of its node's gradient crosses in fp32. As large a part of each gathered unit
// crosses as it is.
TEST(NodeReduction, TrafficIsThatOfTheFormula) {
  for (std::uint32_t stage = 0; stage <= 3; ++stage) {
    const TempDirectory directory;
    const Config config = nodes_of(2, sharded_config(directory.path(), stage, false, DType::kBf16));
    for (const RankRun& run : run_ranks(4, config, {.steps = 2, .rank_count = 4})) {
      ASSERT_EQ(run.failure, "");
      // The sum of both steps: a gather behind a step's last update may fall into the next report.
      RankTraffic traffic;
      for (const StepReport& report : run.result.reports) {
        traffic.gathered_bytes += report.rank_traffic.gathered_bytes;
        traffic.reduced_bytes += report.rank_traffic.reduced_bytes;
        traffic.crossed_bytes += report.rank_traffic.crossed_bytes;
      }
      ASSERT_NE(traffic.gathered_bytes, 0u);
      // Gradients have two bytes; a unit with an odd number of elements is rounded down.
      EXPECT_NEAR(static_cast<double>(traffic.crossed_bytes),
                  static_cast<double>(traffic.reduced_bytes / 2 * 4 + traffic.gathered_bytes) / 2,
                  2 * 16)
          << "stage " << stage;
    }
  }
}

TEST(NodeReduction, NodesThatCannotBeAreRefused) {
  const TempDirectory directory;
  const Config plain = sharded_config(directory.path(), 3, false, DType::kBf16);
  Config grouped = nodes_of(2, plain);
  grouped.sharding.group_ranks = 2;
  for (const auto& [config, words] :
       {std::pair{nodes_of(3, plain), "sharding.node_ranks is 3 for 4 ranks"},
        {nodes_of(0, plain), "sharding.node_ranks is 0 for 4 ranks"},
        {grouped, "sharding.group is 2 of 4 ranks"}}) {
    for (const RankRun& run : run_ranks(4, config, {.steps = 1}))
      EXPECT_NE(run.failure.find(words), std::string::npos) << run.failure;
  }
}

}  // namespace
}  // namespace sluice::test
