// Several ranks as threads: every stage, placement, precision and number of ranks gives the bits of
// the oracle, which adds the ranks' gradients in plain arrays.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <tuple>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

class Sharding : public testing::TestWithParam<std::tuple<std::uint32_t, std::uint32_t>> {};

TEST_P(Sharding, EqualsTheOracleBitForBit) {
  const auto [stage, ranks] = GetParam();
  for (const DType dtype : {DType::kBf16, DType::kFp32, DType::kFp16}) {
    for (const bool uses_nvme : {false, true}) {
      const TempDirectory directory;
      const Config config = sharded_config(directory.path(), stage, uses_nvme, dtype);
      const ToyOptions options{.steps = 3, .evaluate = true, .rank_count = ranks};
      expect_oracle_on_every_rank(run_ranks(ranks, config, options), toy_oracle(config, options),
                                  std::string(name_of(dtype)) + (uses_nvme ? " nvme" : " memory"));
    }
  }
}

// Horizontal order adds a rank's micro-batches first where every rank keeps all gradients.
TEST_P(Sharding, MicroBatchesAreAddedAsTheStageSays) {
  const auto [stage, ranks] = GetParam();
  for (const MicroBatchOrder order : {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
    const TempDirectory directory;
    const Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    ToyOptions options{.steps = 2, .micro_batches = 3, .order = order, .rank_count = ranks};
    options.reduces_each = stage >= 2 || order == MicroBatchOrder::kVertical;
    expect_oracle_on_every_rank(run_ranks(ranks, config, options), toy_oracle(config, options),
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
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    config.optimizer.overlap = policy;
    config.optimizer.clip_norm = clip;
    config.memory.device_bytes = 2_MiB;
    const ToyOptions options{.steps = 3, .rank_count = ranks};
    expect_oracle_on_every_rank(run_ranks(ranks, config, options), toy_oracle(config, options),
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

TEST(ShardingOfFrozenUnits, TheyStayAsTheyAre) {
  for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
    const TempDirectory directory;
    const Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    const ToyOptions options{.steps = 3, .evaluate = true, .frozen_units = {1, 5}, .rank_count = 3};
    expect_oracle_on_every_rank(run_ranks(3, config, options), toy_oracle(config, options),
                                "stage " + std::to_string(stage));
  }
}

// Shards end with a group of 256 elements, so the groups are those of one rank. Random bits belong
// to the element of the whole tensor.
class ShardingOfStates : public testing::TestWithParam<OptimizerState> {};

TEST_P(ShardingOfStates, HasTheOraclesBits) {
  for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
    for (const std::uint32_t ranks : {2u, 3u}) {
      const TempDirectory directory;
      Config config = sharded_config(directory.path(), stage, ranks == 2, DType::kBf16);
      config.optimizer.state = GetParam();
      const ToyOptions options{.steps = 3, .evaluate = true, .rank_count = ranks};
      expect_oracle_on_every_rank(run_ranks(ranks, config, options), toy_oracle(config, options),
                                  "stage " + std::to_string(stage));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(States, ShardingOfStates,
                         testing::Values(OptimizerState::kBf16, OptimizerState::k8bit),
                         [](const auto& state) {
                           return "With_" + std::string(name_of(state.param));
                         });

// The gradients of a rank's shards may wait elsewhere than in host memory; on storage, not where
// they are those of all ranks.
TEST_P(Sharding, GradientsMayWaitElsewhere) {
  const auto [stage, ranks] = GetParam();
  for (const TierChoice tier : {TierChoice::kNvme, TierChoice::kDevice}) {
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    config.placement.gradients = tier;
    ToyOptions options{.steps = 3, .micro_batches = 2, .rank_count = ranks};
    options.reduces_each = stage >= 2;
    const auto runs = run_ranks(ranks, config, options);
    if (stage >= 2 || tier == TierChoice::kDevice) {
      expect_oracle_on_every_rank(runs, toy_oracle(config, options), "gradients elsewhere");
      continue;
    }
    for (const RankRun& run : runs)
      EXPECT_NE(run.failure.find("all gradients are kept in every rank's"), std::string::npos)
          << run.failure;
  }
}

// Each device updates the rank's shard, and units come together there: after the update, or, at
// stage 3, for each use.
TEST_P(Sharding, TheDeviceMayUpdateTheShard) {
  const auto [stage, ranks] = GetParam();
  for (const MicroBatchOrder order : {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
    for (const double clip_norm : {0.0, 1.0}) {
      const TempDirectory directory;
      Config config = sharded_config(directory.path(), stage, false, DType::kBf16);
      config.placement.optimizer = TierChoice::kDevice;
      config.placement.parameters = TierChoice::kAuto;
      config.optimizer.clip_norm = clip_norm;  // without one: eager
      ToyOptions options{.steps = 3,
                         .micro_batches = 2,
                         .order = order,
                         .evaluate = true,
                         .frozen_units = {1},
                         .rank_count = ranks};
      options.reduces_each = stage >= 2 || order == MicroBatchOrder::kVertical;
      expect_oracle_on_every_rank(run_ranks(ranks, config, options), toy_oracle(config, options),
                                  "state on the device");
    }
  }
}

// With one micro-batch stage 3 moves half as much again as stages 0 to 2, which gather once what
// they reduce once. Bytes of whole units without padding; unit 0 is used twice in each direction.
TEST(ShardingTraffic, IsThatOfTheFormula) {
  const ModelSpec model = toy_model();
  std::uint64_t first_unit = 0;
  std::uint64_t others = 0;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    for (const TensorSpec& tensor : model.units[unit].tensors)
      (unit == 0 ? first_unit : others) += 2 * tensor.element_count();
  }
  const std::uint64_t all = first_unit + others;
  for (std::uint32_t stage = 0; stage <= 3; ++stage) {
    for (const std::uint32_t micro_batches : {1u, 3u}) {
      for (const MicroBatchOrder order :
           {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
        const TempDirectory directory;
        Config config = sharded_config(directory.path(), stage, false, DType::kBf16);
        config.optimizer.overlap = OverlapPolicy::kSerial;  // each step's gathers end in it
        // The smallest window: the largest unit fills it.
        if (stage == 3) config.memory.device_bytes = 184_KiB;
        const auto runs = run_ranks(
            2, config,
            {.steps = 3, .micro_batches = micro_batches, .order = order, .rank_count = 2});
        const bool is_vertical = order == MicroBatchOrder::kVertical && micro_batches > 1;
        // Reductions of a unit in a step: each backward use, or their sum.
        const bool reduces_each = stage >= 2 || micro_batches == 1 || is_vertical;
        const std::uint64_t reduced =
            reduces_each ? micro_batches * (2 * first_unit + others) : all;
        const std::uint64_t passes = is_vertical ? 1 : micro_batches;
        // Every use fetches, but one that follows a use of the same unit: backward begins with the
        // head, and the next micro-batch with the unit that backward ends with. The unit of one
        // element finds room beside the head and stays from forward to backward.
        const std::uint64_t gathered =
            stage == 0   ? reduced
            : stage <= 2 ? all
                         : passes * (2 * first_unit + 2 * others - 2) + first_unit;
        for (const RankRun& run : runs) {
          ASSERT_EQ(run.failure, "");
          const RankTraffic traffic = run.result.reports[1].rank_traffic;
          EXPECT_EQ(traffic.reduced_bytes, reduced) << stage << " " << micro_batches;
          EXPECT_EQ(traffic.gathered_bytes, gathered) << stage << " " << micro_batches;
          // Half of each gradient, with its padding, goes to where gradients wait.
          if (stage == 0 || !reduces_each) continue;
          const double copied = static_cast<double>(run.result.reports[1].copies.gradient_bytes);
          EXPECT_NEAR(2 * copied / static_cast<double>(reduced), 1, 0.05) << stage;
        }
      }
    }
  }
}

// Every collective of the steps is in the trace, with the bytes that it is counted with.
TEST(ShardingTrace, CollectivesAddUpWithWhatIsCounted) {
  for (const auto& [stage, keep] :
       {std::pair{0u, 0u}, {1u, 0u}, {2u, 0u}, {3u, 0u}, {3u, 40'000u}}) {
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    config.sharding.keep_gathered_bytes = keep;
    config.optimizer.overlap = OverlapPolicy::kSerial;
    trace_enable(1 << 14);
    const auto runs = run_ranks(3, config, {.steps = 3, .micro_batches = 2, .rank_count = 3});
    const std::vector<TraceRecord> records = trace_take();
    trace_enable(0);
    RankTraffic counted;
    for (const RankRun& run : runs) {
      ASSERT_EQ(run.failure, "");
      for (const StepReport& report : run.result.reports) {
        counted.gathered_bytes += report.rank_traffic.gathered_bytes;
        counted.reduced_bytes += report.rank_traffic.reduced_bytes;
      }
    }
    RankTraffic traced;
    std::uint64_t votes = 0;
    for (const TraceRecord& record : records) {
      if (record.kind != TraceKind::kCollective) continue;
      EXPECT_LE(record.begin_ns, record.end_ns);
      const bool is_both = record.detail == kTraceReduceAndGather;
      votes += record.detail == kTraceVote ? 1 : 0;
      if (record.step == 0) continue;  // votes, and what brings the initial values
      EXPECT_LT(record.unit, toy_model().units.size());
      EXPECT_LE(record.step, 3u);
      traced.gathered_bytes += is_both || record.detail == kTraceGather ? record.size_bytes : 0;
      traced.reduced_bytes += is_both || record.detail == kTraceReduce ? record.size_bytes : 0;
    }
    EXPECT_EQ(traced.gathered_bytes, counted.gathered_bytes) << stage;
    EXPECT_EQ(traced.reduced_bytes, counted.reduced_bytes) << stage;
    EXPECT_GE(votes, 3u * 3u) << stage;
  }
}

// The time that rank 0 has waited for the other ranks in the second of three steps. Rank 1 comes
// late to each.
std::chrono::nanoseconds waited_for_late_rank(std::uint32_t stage, std::chrono::milliseconds late) {
  const TempDirectory directory;
  const Config config = sharded_config(directory.path(), stage, false, DType::kBf16);
  LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<ToyResult> results(2);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      const ModelSpec model = toy_model();
      Engine engine(config, model, *device, collectives.get());
      ToyOptions options{.steps = 3, .rank = rank, .rank_count = 2};
      options.change = [rank, late](std::uint64_t, ToyUses&) {
        if (rank == 1) std::this_thread::sleep_for(late);
      };
      results[rank] = run_toy(engine, model, *device, config, options);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const StepTimes& times = results[0].reports[1].times;
  return std::chrono::nanoseconds(
      times.wait_ns[static_cast<std::size_t>(TraceReason::kCollective)]);
}

// On a machine that is busy rank 0 may be late, too: then rank 1 comes later still.
TEST(ShardingTrace, WaitsForALateRankAreCalledSo) {
  for (const std::uint32_t stage : {0u, 3u}) {
    std::chrono::milliseconds late{60};
    constexpr std::chrono::milliseconds kLateMax{8000};
    while (late < kLateMax && waited_for_late_rank(stage, late) < late / 2) late *= 2;
    EXPECT_LT(late, kLateMax) << "stage " << stage;
  }
}

// Three ranks start, the last with a config of its own. Returns the refusal of each.
std::vector<std::string> refusals_of(const std::function<void(Config&)>& change) {
  LocalWorld world(3, {.timeout_s = 20, .sum = sum_in_order});
  std::vector<std::string> failures(3);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const TempDirectory directory;
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      Config config = sharded_config(directory.path(), 3, false, DType::kBf16);
      if (rank == 2) change(config);
      try {
        const Engine engine(config, toy_model(), *device, collectives.get());
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kRanks);
        failures[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return failures;
}

TEST(ShardingFailure, RanksThatTrainDifferentThingsSayWhichAndWhat) {
  const std::function<void(Config&)> changes[] = {
      [](Config& config) { config.optimizer.adam.beta2 = 0.99; },
      [](Config& config) { config.optimizer.non_finite = NonFinitePolicy::kSkip; },
      [](Config& config) { config.precision.loss_scale.window = 7; },
      [](Config& config) { config.sharding.reduction = RankReduction::kNccl; },
      [](Config& config) { config.optimizer.groups = {{.tensors = {"*"}}}; }};
  for (const auto& change : changes) {
    for (const std::string& failure : refusals_of(change))
      EXPECT_NE(failure.find("the description of the run differs between rank 0 and rank 2"),
                std::string::npos)
          << &change - changes << ": " << failure;
  }
}

TEST(ShardingFailure, RanksMayDifferInWhatTheirHostsHave) {
  const std::vector<std::string> none(3);
  EXPECT_EQ(refusals_of([](Config& config) {
              config.placement = {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost};
              config.optimizer.overlap = OverlapPolicy::kSerial;
              config.optimizer.lanes = 1;
              config.storage.verify = Verify::kOff;
              config.storage.queue_depth = 2;
              config.threads = 1;
            }),
            none);
}

TEST(ShardingFailure, ARankThatNeverComesIsNamedByTheConstructor) {
  LocalWorld world(2, {.timeout_s = 0.3, .sum = sum_in_order});
  const TempDirectory directory;
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const auto collectives = world.join(0, *device);
  const Config config = sharded_config(directory.path(), 3, false, DType::kBf16);
  const std::string message = expect_error(ErrorCode::kRanks, [&] {
    const Engine engine(config, toy_model(), *device, collectives.get());
  });
  EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
  EXPECT_EQ(device->allocated_bytes(), 0u);
}

// Rank 1 stops taking part after a step: the others name it, the operation and the unit.
TEST(ShardingFailure, RankThatStopsIsNamedWithOperationAndUnit) {
  LocalWorld world(3, {.timeout_s = 3, .sum = sum_in_order});
  std::vector<std::string> failures(3);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      const TempDirectory directory;
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      const Config config = sharded_config(directory.path(), 3, false, DType::kBf16);
      try {
        const ModelSpec model = toy_model();
        Engine engine(config, model, *device, collectives.get());
        ToyOptions options{.steps = 5, .rank = rank, .rank_count = 3};
        options.change = [rank](std::uint64_t step, ToyUses&) {
          if (rank == 1 && step == 2) throw Error(ErrorCode::kInternal, "gone");
        };
        (void)run_toy(engine, model, *device, config, options);
      } catch (const Error& error) {
        failures[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::uint32_t rank : {0u, 2u}) {
    EXPECT_NE(failures[rank].find("rank 1"), std::string::npos) << failures[rank];
    EXPECT_NE(failures[rank].find("of \""), std::string::npos) << failures[rank];
  }
}

// Homes that a stage does not have, said before anything is allocated.
TEST(ShardingConfig, HomesThatAStageLacksAreRefused) {
  for (const auto& [stage, home] :
       {std::pair{1u, TierChoice::kHost}, std::pair{2u, TierChoice::kNvme}}) {
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, false, DType::kBf16);
    config.placement.parameters = home;
    for (const RankRun& run : run_ranks(2, config, {.steps = 1}))
      EXPECT_NE(run.failure.find("placement.parameters"), std::string::npos) << run.failure;
    EXPECT_EQ(run_ranks(1, config, {.steps = 1})[0].failure, "");
  }
}

}  // namespace
}  // namespace sluice::test
