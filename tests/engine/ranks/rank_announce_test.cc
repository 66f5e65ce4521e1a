// Several ranks whose routers choose different units: every rank uses the union, and a rank that
// has nothing to compute contributes zeros. The bits are those of the oracle.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include <sluice/units.h>
#include "gpu/ranks/local_collectives.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/engine/step/announce_cases.h"
#include "tests/support/campaign.h"
#include "tests/support/expect_error.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

class RankAnnouncements : public testing::TestWithParam<std::uint32_t> {};

TEST_P(RankAnnouncements, TheUnionIsUsedAndTheRestIsZero) {
  const std::uint32_t stage = GetParam();
  side_by_side(seeds_of(campaign(6)), [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, random() % 2 == 0, DType::kBf16);
    if (stage == 3) config.memory.device_bytes = 400_KiB + random() % 4 * 60_KiB;
    if (random() % 2 == 0) config.sharding.keep_gathered_bytes = 8_KiB;
    config.optimizer.overlap =
        random() % 2 == 0 ? OverlapPolicy::kSpeculative : OverlapPolicy::kDeferred;
    config.optimizer.clip_norm = random() % 2 == 0 ? 1e9 : 1;
    config.optimizer.untouched = UntouchedPolicy{static_cast<std::uint8_t>(random() % 3)};
    const auto ranks = static_cast<std::uint32_t>(2 + random() % 2);
    ToyOptions options = routed_options(seed);
    options.micro_batches = static_cast<std::uint32_t>(1 + random() % 2);
    options.reduces_each = stage >= 2 || options.micro_batches == 1;
    options.rank_count = ranks;
    // At least one rank computes in each use.
    options.computes = [seed, ranks](std::uint32_t rank, const ToyUse& use) {
      std::mt19937_64 choice(seed + use.number % 0x100000 * 64);
      const std::uint64_t bits = choice();
      return rank == bits % ranks || (bits >> (32 + rank) & 1) != 0;
    };
    const std::vector<RankRun> runs =
        run_ranks(ranks, config, options, {.delay_us_max = 100, .seed = seed});
    const ToyResult oracle = toy_oracle(config, options);
    expect_oracle_on_every_rank(runs, oracle, "seed " + std::to_string(seed));
    for (const RankRun& run : runs) {
      for (std::size_t i = 0; i < oracle.reports.size(); ++i) {
        EXPECT_EQ(run.result.reports[i].schedule_changes, 0u);
        if (config.optimizer.untouched != UntouchedPolicy::kLazy) {
          EXPECT_EQ(run.result.reports[i].untouched_units, oracle.reports[i].untouched_units);
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, RankAnnouncements, testing::Values(0u, 1u, 2u, 3u),
                         [](const auto& value) { return "stage" + std::to_string(value.param); });

// Two engines on two ranks, each driven by `drive(rank, engine, device, stream)`.
void on_two_ranks(const Config& config, const auto& drive,
                  const ModelSpec& model = toy_model_of(routed_options(1))) {
  LocalWorld world(2, {.timeout_s = 20, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = config.memory.device_bytes.value()});
      const auto collectives = world.join(rank, *device);
      Engine engine(config, model, *device, collectives.get());
      engine.initialize(toy_values());
      const Stream stream(*device, "test");
      drive(rank, engine, *device, stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class TwoRanks : public testing::Test {
 protected:
  TwoRanks() { config_.memory.device_bytes = 500_KiB; }

  const TempDirectory directory_;
  Config config_ = sharded_config(directory_.path(), 3, true, DType::kBf16);
};

// An evaluation that is left while units are announced: ranks have fetched them differently far.
TEST_F(TwoRanks, EvaluationsMayEndHalfway) {
  const ModelSpec model = toy_model_of(routed_options(1));
  on_two_ranks(config_,
               [&](std::uint32_t rank, Engine& engine, HostDevice& device, const Stream& stream) {
                 for (std::uint32_t round = 0; round < 8; ++round) {
                   {
                     Inference inference = engine.begin_inference();
                     (void)inference.acquire(UnitId{0}, stream);
                     std::vector<UnitId> own = routed(round, rank, 3);
                     const std::vector<UnitId> agreed = inference.announce(own);
                     EXPECT_EQ(agreed.size(), 6u);
                     for (std::uint32_t use = 0; use < round % 7 && use < agreed.size(); ++use)
                       (void)inference.acquire(agreed[use], stream);
                     if (rank == round % 2)
                       std::this_thread::sleep_for(std::chrono::milliseconds(3));
                   }
                   Step step = engine.begin_step({.learning_rate = 1e-3});
                   walk_step(step, model, engine, device, stream, config_, 1);
                   EXPECT_EQ(step.finish().step, round + 1);
                 }
               });
}

// One rank announces, the other acquires a unit that the schedule does not expect.
TEST_F(TwoRanks, WhoDoesSomethingElseIsNamed) {
  std::atomic<int> failed = 0;
  on_two_ranks(config_, [&](std::uint32_t rank, Engine& engine, HostDevice&, const Stream& stream) {
    Step step = engine.begin_step({.learning_rate = 1e-3});
    try {
      if (rank == 0) {
        step.announce(routed(1, 0, 3), Pass::kForward);
      } else {
        (void)step.acquire(UnitId{3}, Pass::kForward, stream);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kRanks);
      const std::string words = error.what();
      EXPECT_NE(words.find("which announces units (forward) behind 0 uses"), std::string::npos)
          << words;
      EXPECT_NE(words.find("with use 0 of unit \"h.2\" (forward)"), std::string::npos) << words;
      ++failed;
    }
  });
  EXPECT_EQ(failed, 2);
}

// In backward, rank 0 uses the second of two announced units before one of the schedule, and rank 1
// after it. Both have one size, so the ranks would add the gradients of one to the other's.
TEST_F(TwoRanks, GradientsInDifferentOrdersAreRefused) {
  ModelSpec model = toy_model_of(routed_options(1));
  const std::vector<UnitId> experts = {UnitId{kFirstExpert}, UnitId{kFirstExpert + 3}};
  for (std::size_t tensor = 0; tensor < 2; ++tensor)
    model.units[3].tensors[tensor].shape = model.units[kFirstExpert].tensors[tensor].shape;
  model.units[3].tensors.resize(2);
  for (const OverlapPolicy policy :
       {OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative, OverlapPolicy::kEager}) {
    std::atomic<int> failed = 0;
    config_.optimizer.overlap = policy;
    config_.optimizer.clip_norm = 0;
    config_.optimizer.non_finite = NonFinitePolicy::kStop;
    const auto drive = [&](std::uint32_t rank, Engine& engine, HostDevice&, const Stream& stream) {
      const auto walk = [&](Step& step, std::uint32_t turn) {
        for (const std::uint32_t unit : {0u, 1u, 2u, 3u, 4u, 5u, 0u})
          (void)step.acquire(UnitId{unit}, Pass::kForward, stream);
        EXPECT_EQ(step.announce(experts, Pass::kBackward), experts);
        std::vector<UnitId> uses = {experts[0]};
        for (const std::uint32_t unit : {0u, 5u, 4u, 3u, 2u, 1u, 0u}) uses.push_back(UnitId{unit});
        uses.insert(uses.begin() + 4 + turn, experts[1]);
        for (const UnitId unit : uses) (void)step.acquire(unit, Pass::kBackward, stream);
      };
      {
        Step step = engine.begin_step({.learning_rate = 1e-3});
        walk(step, 0);
        EXPECT_EQ(step.finish().step, 1u);
      }
      {
        Step step = engine.begin_step({.learning_rate = 1e-3});
        walk(step, rank);
        const std::string words = expect_error(ErrorCode::kRanks, [&] { (void)step.finish(); });
        EXPECT_NE(words.find("whose backward uses come in an order of hash"), std::string::npos)
            << words;
        EXPECT_NE(words.find("use announced units at the same places between the others"),
                  std::string::npos)
            << words;
        if (!words.empty()) ++failed;
      }
      const std::string words = expect_error(
          ErrorCode::kPoisoned, [&] { (void)engine.begin_step({.learning_rate = 1e-3}); });
      EXPECT_NE(words.find("step 2"), std::string::npos) << words;
    };
    on_two_ranks(config_, drive, model);
    EXPECT_EQ(failed, 2);
  }
}

// The stream of the last use is gone when the ranks vote.
TEST_F(TwoRanks, TheLastUsesStreamMayBeGone) {
  const ModelSpec model = toy_model_of(routed_options(1));
  on_two_ranks(config_,
               [&](std::uint32_t rank, Engine& engine, HostDevice& device, const Stream& stream) {
                 {
                   Inference inference = engine.begin_inference();
                   {
                     const Stream own(device, "short");
                     (void)inference.acquire(UnitId{0}, own);
                   }
                   for (const UnitId unit : inference.announce(routed(1, rank, 3)))
                     (void)inference.acquire(unit, stream);
                 }
                 Step step = engine.begin_step({.learning_rate = 1e-3});
                 walk_step(step, model, engine, device, stream, config_, 1);
                 EXPECT_EQ(step.finish().step, 1u);
               });
}

// The rank that comes first waits for the other, and its report says for what.
TEST_F(TwoRanks, TheVotesTimeIsACause) {
  std::atomic<bool> is_asking = false;
  on_two_ranks(config_, [&](std::uint32_t rank, Engine& engine, HostDevice& device,
                            const Stream& stream) {
    const ModelSpec model = toy_model_of(routed_options(1));
    Step step = engine.begin_step({.learning_rate = 1e-3});
    (void)step.acquire(UnitId{0}, Pass::kForward, stream);
    device.synchronize(stream.id());
    if (rank == 0) is_asking = true;
    if (rank == 1) {
      while (!is_asking) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(60));
    }
    for (const UnitId unit : step.announce(routed(1, 0, 3), Pass::kForward))
      (void)step.acquire(unit, Pass::kForward, stream);
    ToyUses rest = {{UnitId{1}, Pass::kForward, 1}};
    for (const std::uint32_t unit : {2u, 3u, 4u, 5u, 0u})
      rest.push_back({UnitId{unit}, Pass::kForward, unit + 2});
    for (const std::uint32_t unit : {0u, 5u, 4u, 3u, 2u, 1u, 0u})
      rest.push_back({UnitId{unit}, Pass::kBackward, rest.size() + 1});
    walk_step(step, rest, engine, device, stream, config_);
    const StepReport report = step.finish();
    EXPECT_EQ(report.schedule_changes, 0u);
    const StepTimes& times = report.times;
    const std::int64_t waited_ns = times.wait_ns[static_cast<std::size_t>(TraceReason::kAnnounce)];
    if (rank == 0) {
      EXPECT_GT(waited_ns, 0);
    }
    EXPECT_EQ(times.total_ns, times.compute_ns + times.exposed_ns() + times.other_ns);
  });
}

TEST_F(TwoRanks, ModelsThatDifferInThatAreRefused) {
  LocalWorld world(2, {.timeout_s = 20, .sum = sum_in_order});
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 500_KiB});
      const auto collectives = world.join(rank, *device);
      ToyOptions options = routed_options(1);
      options.experts = rank == 0 ? 4 : 0;
      const std::string words = expect_error(ErrorCode::kRanks, [&] {
        const Engine engine(config_, toy_model_of(options), *device, collectives.get());
      });
      EXPECT_NE(words.find("all need the same model"), std::string::npos) << words;
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// They leave the window as it is, so only the description tells.
TEST_F(TwoRanks, UnitsOfDifferentKindsAreRefused) {
  for (const bool is_opaque : {false, true}) {
    LocalWorld world(2, {.timeout_s = 20, .sum = sum_in_order});
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const auto device = make_host_device({.memory_bytes = 500_KiB});
        const auto collectives = world.join(rank, *device);
        ModelSpec model = toy_model_of(routed_options(1));
        model.units[kFirstExpert + 3].is_frozen = is_opaque || rank == 0;
        model.units[kFirstExpert + 3].is_opaque = is_opaque && rank == 0;
        const std::string words = expect_error(ErrorCode::kRanks, [&] {
          const Engine engine(config_, model, *device, collectives.get());
        });
        EXPECT_NE(words.find("the description of the run differs"), std::string::npos) << words;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace sluice::test
