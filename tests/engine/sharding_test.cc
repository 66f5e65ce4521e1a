// Several ranks as threads: every stage, placement, precision and number of ranks gives the bits of
// the oracle, which adds the ranks' gradients in plain arrays.
#include <gtest/gtest.h>

#include <thread>

#include "base/units.h"
#include "cpu_optim/ordered_sum.h"
#include "gpu/local_collectives.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

struct RankRun {
  ToyResult result;
  Traffic predicted;
  std::string failure;
  std::uint64_t host_bytes = 0;
};

// One engine a rank, on its own device and thread.
std::vector<RankRun> run_ranks(std::uint32_t count, const Config& config, const ToyOptions& options,
                               double timeout_s = 60) {
  LocalWorld world(count, {.timeout_s = timeout_s, .sum = sum_in_order});
  std::vector<RankRun> runs(count);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device =
          make_host_device({.memory_bytes = config.memory.device_bytes.value_or(64_MiB)});
      const auto collectives = world.join(rank, *device);
      try {
        const ModelSpec model = toy_model();
        Engine engine(config, model, *device, {}, collectives.get());
        ToyOptions own = options;
        own.rank = rank;
        runs[rank].host_bytes = engine.placement().host_bytes();
        runs[rank].result = run_toy(engine, model, *device, config, own);
      } catch (const std::exception& error) {
        runs[rank].failure = error.what();
        collectives->abort(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return runs;
}

struct Home {
  const char* name;
  TierChoice parameters;
  TierChoice optimizer;
};

constexpr Home kMemory{"memory", TierChoice::kAuto, TierChoice::kHost};
constexpr Home kNvme{"nvme", TierChoice::kNvme, TierChoice::kNvme};
constexpr Home kDeviceAndNvme{"optimizer_nvme", TierChoice::kAuto, TierChoice::kNvme};

// Stages 1 and 2 keep parameters on the device.
Home home_for(std::uint32_t stage, bool uses_nvme) {
  if (!uses_nvme) return kMemory;
  return stage == 1 || stage == 2 ? kDeviceAndNvme : kNvme;
}

Config config_for(const std::string& path, std::uint32_t stage, bool uses_nvme, DType dtype) {
  Config config = toy_config(path);
  const Home home = home_for(stage, uses_nvme);
  config.placement = {home.parameters, home.optimizer};
  config.precision = {.parameters = dtype, .gradients = dtype};
  config.sharding.stage = stage;
  config.threads = 1;
  return config;
}

void expect_oracle(const std::vector<RankRun>& runs, const ToyResult& expected,
                   const std::string& what) {
  for (std::size_t rank = 0; rank < runs.size(); ++rank) {
    ASSERT_EQ(runs[rank].failure, "") << what << ", rank " << rank;
    EXPECT_TRUE(runs[rank].result.state == expected.state) << what << ", rank " << rank;
    for (std::size_t i = 0; i < expected.reports.size(); ++i) {
      EXPECT_EQ(runs[rank].result.reports[i].gradient_norm, expected.reports[i].gradient_norm)
          << what << ", rank " << rank;
    }
  }
}

class Sharding : public testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {};

TEST_P(Sharding, EqualsTheOracleBitForBit) {
  const auto [stage, ranks] = GetParam();
  for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
    for (const bool uses_nvme : {false, true}) {
      const TempDirectory directory;
      const Config config = config_for(directory.path(), stage, uses_nvme, dtype);
      const ToyOptions options{.steps = 3, .evaluate = true, .rank_count = ranks};
      expect_oracle(run_ranks(ranks, config, options), toy_oracle(config, options),
                    std::string(name_of(dtype)) + (uses_nvme ? " nvme" : " memory"));
    }
  }
}

// Horizontal order adds a rank's micro-batches first where every rank keeps all gradients.
TEST_P(Sharding, MicroBatchesAreAddedAsTheStageSays) {
  const auto [stage, ranks] = GetParam();
  for (const MicroBatchOrder order : {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
    const TempDirectory directory;
    const Config config = config_for(directory.path(), stage, true, DType::kBf16);
    ToyOptions options{.steps = 2, .micro_batches = 3, .order = order, .rank_count = ranks};
    options.reduces_each = stage >= 2 || order == MicroBatchOrder::kVertical;
    expect_oracle(run_ranks(ranks, config, options), toy_oracle(config, options),
                  order == MicroBatchOrder::kVertical ? "vertical" : "horizontal");
  }
}

TEST_P(Sharding, EveryUpdatePolicyGivesTheSameBits) {
  const auto [stage, ranks] = GetParam();
  for (const auto& [policy, clip] : {std::pair{OverlapPolicy::kSerial, 1.0},
                                     {OverlapPolicy::kDeferred, 1.0},
                                     {OverlapPolicy::kEager, 0.0},
                                     {OverlapPolicy::kSpeculative, 1.0}}) {
    const TempDirectory directory;
    Config config = config_for(directory.path(), stage, true, DType::kBf16);
    config.optimizer.overlap = policy;
    config.optimizer.clip_norm = clip;
    config.memory.device_bytes = 2_MiB;
    const ToyOptions options{.steps = 3, .rank_count = ranks};
    expect_oracle(run_ranks(ranks, config, options), toy_oracle(config, options),
                  std::string(name_of(policy)));
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Sharding,
                         testing::Combine(testing::Values(0u, 1u, 2u, 3u),
                                          testing::Values(2u, 3u, 4u)),
                         [](const auto& value) {
                           return "stage" + std::to_string(std::get<0>(value.param)) + "_ranks" +
                                  std::to_string(std::get<1>(value.param));
                         });

}  // namespace
}  // namespace sluice::test
