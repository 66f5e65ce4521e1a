// Several ranks as processes: the cases of sharding_test.cc over MPI, against the same oracle.
// Every process runs all cases, in step.
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/mpi_collectives.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// The process is one rank for all cases.
struct Rank {
  MpiWorld world{{.timeout_s = 60, .sum = sum_in_order}};
  std::unique_ptr<HostDevice> device = make_host_device({.memory_bytes = 64ull << 20});
  std::unique_ptr<Collectives> collectives = world.join(*device);
};
Rank& this_rank() {
  static Rank rank;
  return rank;
}

ToyResult expect_oracle_here(const Config& config, ToyOptions options, const std::string& what) {
  Rank& own = this_rank();
  const ModelSpec model = toy_model();
  options.rank_count = own.world.rank_count();
  const ToyResult expected = toy_oracle(config, options);
  options.rank = own.world.rank();
  Engine engine(config, model, *own.device, own.collectives.get());
  ToyResult result = run_toy(engine, model, *own.device, config, options);
  expect_oracle(result, expected, what);
  return result;
}

TEST(ShardingOverMpi, EveryStageAndPlacementEqualsTheOracle) {
  for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
    for (const bool uses_nvme : {false, true}) {
      for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
        const TempDirectory directory;
        const Config config = sharded_config(directory.path(), stage, uses_nvme, dtype);
        expect_oracle_here(config, {.steps = 3},
                           "stage " + std::to_string(stage) + (uses_nvme ? " nvme " : " memory ") +
                               std::string(name_of(dtype)));
      }
    }
  }
}

// Kept units are gathered once a step, with evaluations between the steps; all of them kept, that
// is what stage 2 gathers.
TEST(ShardingOverMpi, KeptUnitsChangeGathersAndNoBit) {
  for (const std::uint64_t keep : {35'000u, 1u << 20}) {
    for (const bool uses_nvme : {false, true}) {
      const TempDirectory directory;
      Config config = sharded_config(directory.path(), 3, uses_nvme, DType::kBf16);
      config.optimizer.overlap = OverlapPolicy::kSerial;
      config.sharding.keep_gathered_bytes = keep;
      const ToyResult kept = expect_oracle_here(config, {.steps = 3, .evaluate = true}, "kept");
      config = sharded_config(directory.path(), 2, false, DType::kBf16);
      config.optimizer.overlap = OverlapPolicy::kSerial;
      const ToyResult stage2 = expect_oracle_here(config, {.steps = 3, .evaluate = true}, "2");
      for (std::size_t step = 0; step < kept.reports.size(); ++step)
        EXPECT_EQ(kept.reports[step].rank_traffic.gathered_bytes ==
                      stage2.reports[step].rank_traffic.gathered_bytes,
                  keep != 35'000u);
    }
  }
}

TEST(ShardingOverMpi, GroupsOfTwoEqualTheOracle) {
  if (this_rank().world.rank_count() != 4) GTEST_SKIP() << "four ranks make two groups of two";
  for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
    for (const bool uses_nvme : {false, true}) {
      for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
        const TempDirectory directory;
        Config config = sharded_config(directory.path(), stage, uses_nvme, dtype);
        config.sharding.group_ranks = 2;
        expect_oracle_here(config, {.steps = 3},
                           "stage " + std::to_string(stage) + std::string(name_of(dtype)));
      }
    }
  }
}

TEST(ShardingOverMpi, NodesOfTwoEqualTheOracle) {
  if (this_rank().world.rank_count() != 4) GTEST_SKIP() << "four ranks make two nodes of two";
  for (const std::uint32_t stage : {0u, 2u, 3u}) {
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    config.sharding.reduction = RankReduction::kNodes;
    config.sharding.node_ranks = 2;
    expect_oracle_here(config, {.steps = 3}, "stage " + std::to_string(stage));
  }
}

}  // namespace
}  // namespace sluice::test
