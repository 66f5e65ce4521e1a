// Several ranks whose computation leaves its schedule: the same way on all of them, in steps and in
// evaluations. The bits are those of the oracle. Ranks that leave it in different ways say so.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/hang_guard.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kExtra = 1000;  // numbers of uses that are not planned

// Uses that are left out, exchanged or added, equally on every rank.
void scramble(std::uint64_t seed, std::uint64_t step, ToyUses& uses) {
  std::mt19937_64 choice(seed * 100 + step / 2);  // every other step is as the one before
  for (std::uint64_t change = choice() % 6; change-- > 0;) {
    const std::size_t at = choice() % uses.size();
    const auto place = uses.begin() + static_cast<std::ptrdiff_t>(at);
    switch (choice() % 4) {
      case 0: uses.erase(place); break;
      case 1: std::swap(uses[at], uses[choice() % uses.size()]); break;
      case 2:
        if (uses.size() > 8) uses.resize(uses.size() - 2);
        break;
      default:
        uses.insert(place, {UnitId{static_cast<std::uint32_t>(choice() % 6)},
                            choice() % 2 == 0 ? Pass::kForward : Pass::kBackward, kExtra + change});
    }
  }
}

class RankSchedule : public testing::TestWithParam<std::uint32_t> {};

// 60 seeds over the four stages.
TEST_P(RankSchedule, AllRanksLeaveItTogether) {
  const std::uint32_t stage = GetParam();
  side_by_side(seeds_of(campaign(15)), [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, random() % 2 == 0, DType::kBf16);
    if (stage == 3) config.memory.device_bytes = 300_KiB + random() % 4 * 60_KiB;
    if (random() % 2 == 0) config.sharding.keep_gathered_bytes = 16_KiB;
    config.optimizer.overlap =
        random() % 2 == 0 ? OverlapPolicy::kSpeculative : OverlapPolicy::kDeferred;
    config.optimizer.clip_norm = random() % 2 == 0 ? 1e9 : 1;
    const auto ranks = static_cast<std::uint32_t>(2 + random() % 2);
    const ToyOptions options{
        .steps = 4,
        .micro_batches = static_cast<std::uint32_t>(stage >= 2 ? 1 + random() % 2 : 1),
        .evaluate = random() % 2 == 0,
        .change = [seed](std::uint64_t step, ToyUses& uses) { scramble(seed, step, uses); },
        .rank_count = ranks};
    expect_oracle_on_every_rank(
        run_ranks(ranks, config, options, {.delay_us_max = 100, .seed = seed}),
        toy_oracle(config, options), "seed " + std::to_string(seed));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, RankSchedule, testing::Values(0u, 1u, 2u, 3u),
                         [](const auto& value) { return "stage" + std::to_string(value.param); });

// An evaluation that is left halfway: ranks that have fetched ahead need the others for that.
TEST(RankScheduleOfEvaluations, TheyMayEndHalfway) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, true, DType::kBf16);
  config.memory.device_bytes = 400_KiB;
  constexpr std::uint32_t kRanks = 2;
  LocalWorld world(kRanks, {.timeout_s = 20, .sum = sum_in_order});
  const ModelSpec model = toy_model();
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_delayed_device(
          make_host_device({.memory_bytes = *config.memory.device_bytes}), rank, 300);
      const auto collectives = world.join(rank, *device);
      Engine engine(config, model, *device, collectives.get());
      engine.initialize(toy_values());
      const Stream stream(*device, "test");
      for (std::uint32_t round = 0; round < 12; ++round) {
        {
          Inference inference = engine.begin_inference();
          for (std::uint32_t use = 0; use < round % 4; ++use)
            (void)inference.acquire(UnitId{(use + round / 4) % 6}, stream);
        }
        Step step = engine.begin_step({.learning_rate = 1e-3});
        walk_step(step, model, engine, *device, stream, config, 1);
        EXPECT_EQ(step.finish().step, round + 1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RankScheduleFailure, RanksThatUseDifferentUnitsAreNamed) {
  for (const std::uint32_t stage : {1u, 3u}) {
    const TempDirectory directory;
    const Config config = sharded_config(directory.path(), stage, false, DType::kBf16);
    std::atomic<std::uint32_t> next_rank = 0;
    const auto runs = run_ranks(2, config,
                                {.steps = 2,
                                 .change =
                                     [&](std::uint64_t, ToyUses& uses) {
                                       thread_local const std::uint32_t own = next_rank++;
                                       std::swap(uses[1], uses[2 + own]);
                                     },
                                 .rank_count = 2});
    for (const RankRun& run : runs) {
      EXPECT_NE(run.failure.find("with use 1 of unit \"h.1\" (forward)"), std::string::npos)
          << run.failure;
      EXPECT_NE(run.failure.find("with use 1 of unit \"h.2\" (forward)"), std::string::npos)
          << run.failure;
      EXPECT_NE(run.failure.find("all must take equal steps"), std::string::npos) << run.failure;
    }
  }
}

// Fetching has stopped by then. An application that goes on would wait for it.
TEST(RankScheduleFailure, NothingGoesOnAfterThat) {
  const TempDirectory directory;
  const Config config = sharded_config(directory.path(), 3, false, DType::kBf16);
  const ModelSpec model = toy_model();
  LocalWorld world(2, {.timeout_s = 20, .sum = sum_in_order});
  std::vector<std::thread> threads;
  const HangGuard guard("a rank that goes on");
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      Engine engine(config, model, *device, collectives.get());
      engine.initialize(toy_values());
      const Stream stream(*device, "test");
      Step step = engine.begin_step({.learning_rate = 1e-3});
      expect_error(ErrorCode::kRanks,
                   [&] { (void)step.acquire(UnitId{2 + rank}, Pass::kForward, stream); });
      for (std::uint32_t unit = 0; unit < 6; ++unit)
        EXPECT_THROW((void)step.acquire(UnitId{unit}, Pass::kForward, stream), Error);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Each rank adds its micro-batches first, and reduces behind the last use that is expected.
TEST(RankScheduleFailure, SumsOfMicroBatchesNeedTheirSchedule) {
  const TempDirectory directory;
  const Config config = sharded_config(directory.path(), 1, false, DType::kBf16);
  const auto runs =
      run_ranks(2, config,
                {.steps = 2,
                 .micro_batches = 2,
                 .change = [](std::uint64_t, ToyUses& uses) { std::swap(uses[1], uses[2]); },
                 .rank_count = 2});
  for (const RankRun& run : runs)
    EXPECT_NE(run.failure.find("a step of 2 micro-batches follows ModelSpec::forward_order"),
              std::string::npos)
        << run.failure;
}

}  // namespace
}  // namespace sluice::test
