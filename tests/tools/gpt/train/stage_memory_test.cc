// The memory that ranks have in use in each phase of a step, metered, against the formula of the
// ZeRO stages and against the prediction of `sluice plan --stages`: optimizer state is 1/N from
// stage 1 on, gradients from stage 2 on, parameters and a window that gathers from stage 3 on.
#include <gtest/gtest.h>

#include <thread>

#include <fmt/format.h>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"
#include "tools/report/stage_table.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kRanks = 4;
constexpr std::uint64_t kLargeUnits = 20;
constexpr std::uint64_t kLargeElements = 192 * 256;
constexpr std::uint64_t kSmallUnits = 2;  // what stage 3 keeps gathered
constexpr std::uint64_t kSmallElements = 16 << 10;
constexpr std::uint64_t kParameters = kLargeUnits * kLargeElements + kSmallUnits * kSmallElements;
constexpr double kTolerance = 0.05;

ModelSpec layers() {
  ModelSpec model;
  const auto add = [&](const std::string& name, std::uint64_t elements) {
    model.units.push_back({name, {{.name = name + ".weight", .shape = {elements}}}});
  };
  add("first", kSmallElements);
  for (std::uint64_t i = 0; i < kLargeUnits; ++i) add(fmt::format("layer.{}", i), kLargeElements);
  add("last", kSmallElements);
  return model;
}

struct Case {
  std::uint32_t stage = 0;
  std::uint32_t group = 0;  // 0: all ranks
  std::uint32_t micro_batches = 1;
  OverlapPolicy policy = OverlapPolicy::kSerial;
  TierChoice gradients = TierChoice::kHost;
  bool uses_nvme = true;
  bool is_on_device = false;  // stage 3: the shards' home, and that of their state
};

Config config_of(const Case& given, const std::string& path) {
  Config config = toy_config(path);
  const bool is_replicated = given.stage == 1 || given.stage == 2;
  config.placement.optimizer = given.uses_nvme ? TierChoice::kNvme : TierChoice::kHost;
  config.placement.parameters = is_replicated     ? TierChoice::kDevice
                                : given.uses_nvme ? TierChoice::kNvme
                                                  : TierChoice::kHost;
  if (given.is_on_device)
    config.placement.parameters = config.placement.optimizer = TierChoice::kDevice;
  config.placement.gradients = given.gradients;
  config.memory.device_bytes = 16_MiB;
  config.sharding.stage = given.stage;
  config.sharding.group_ranks = given.group;
  config.sharding.keep_gathered_bytes = 2 * kSmallElements;
  config.optimizer.overlap = given.policy;
  config.optimizer.clip_norm = given.policy == OverlapPolicy::kEager ? 0 : 1e9;
  config.threads = 1;
  return config;
}

// The marks of every rank: the most over all steps.
std::vector<PhaseMarks> measure(const Case& given, const Config& config) {
  LocalWorld world(kRanks, {.timeout_s = 60, .sum = sum_in_order});
  std::vector<PhaseMarks> marks(kRanks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = *config.memory.device_bytes});
      const auto collectives = world.join(rank, *device);
      const ModelSpec model = layers();
      Engine engine(config, model, *device, collectives.get());
      const ToyResult result =
          run_toy(engine, model, *device, config,
                  {.steps = 3, .micro_batches = given.micro_batches, .rank = rank});
      for (const StepReport& report : result.reports) raise_marks(marks[rank], report.buffers);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return marks;
}

const PoolMarks& of(const PhaseMarks& marks, StepPhase phase) {
  return marks[static_cast<std::size_t>(phase)];
}

void expect_near(std::uint64_t actual, double expected, const std::string& what) {
  EXPECT_NEAR(static_cast<double>(actual), expected, kTolerance * expected) << what;
}

// The table of the stages, by hand: bf16 parameters and gradients, 10 bytes of record beside them.
void expect_formula(const Case& given, const PhaseMarks& marks) {
  const double shards = given.group == 0 ? kRanks : given.group;
  const double all = kParameters;
  const double small = kSmallUnits * kSmallElements;
  const double gradients = 2 * all / (given.stage >= 2 ? shards : 1);
  const PoolMarks& backward = of(marks, StepPhase::kBackward);
  const PoolMarks& optimizer = of(marks, StepPhase::kOptimizer);
  for (const PoolMarks& phase : marks) {
    expect_near(phase.most(MemoryKind::kOptimizer), 10 * all / (given.stage >= 1 ? shards : 1),
                "optimizer");
    expect_near(phase.most(MemoryKind::kParameters),
                given.stage == 3 ? 2 * (all - small) / shards + 2 * small : 2 * all, "parameters");
  }
  // Gradients that wait on storage are written later, so they count under the optimizer.
  expect_near(
      (given.gradients == TierChoice::kNvme ? optimizer : backward).most(MemoryKind::kGradients),
      gradients, "gradients");
  EXPECT_LE(static_cast<double>(backward.most(MemoryKind::kGradients)), 1.05 * gradients);
  // The lease and two units ahead, whole.
  if (given.stage == 3)
    expect_near(backward.most(MemoryKind::kWindow), 3 * 2 * kLargeElements, "window");
  if (given.stage == 1 || given.stage == 2) {
    EXPECT_EQ(backward.most(MemoryKind::kWindow), 0u);
  }
  EXPECT_GE(backward.most(MemoryKind::kGradientSlots), 2 * kLargeElements);
  EXPECT_LE(backward.most(MemoryKind::kGradientSlots), 2 * 2 * kLargeElements);
  if (given.micro_batches == 1 && given.policy == OverlapPolicy::kSerial) {
    EXPECT_EQ(of(marks, StepPhase::kForward).most(MemoryKind::kGradients), 0u);
  }
}

void expect_prediction(const Case& given, const PhaseMarks& marks, const PhaseMarks& predicted) {
  for (std::size_t phase = 0; phase < kStepPhases; ++phase) {
    SCOPED_TRACE(name_of(static_cast<StepPhase>(phase)));
    const PoolMarks& actual = marks[phase];
    const PoolMarks& expected = predicted[phase];
    for (std::size_t pool = 0; pool < kMemoryPools; ++pool)
      EXPECT_LE(actual.pool_bytes[pool], expected.pool_bytes[pool]) << "pool " << pool;
    for (std::size_t tier = 0; tier < kTiers; ++tier)
      EXPECT_LE(actual.tier_bytes[tier], expected.tier_bytes[tier]) << "tier " << tier;
    for (const MemoryKind kind :
         {MemoryKind::kParameters, MemoryKind::kWindow, MemoryKind::kOptimizer})
      expect_near(actual.most(kind), static_cast<double>(expected.most(kind)), name_of(kind));
    if (given.policy != OverlapPolicy::kSerial) continue;
    if (given.gradients != TierChoice::kNvme && phase != 2)
      expect_near(actual.most(MemoryKind::kGradients),
                  static_cast<double>(expected.most(MemoryKind::kGradients)), "gradients");
    if (given.uses_nvme)
      expect_near(actual.most(Tier::kNvme), static_cast<double>(expected.most(Tier::kNvme)),
                  "nvme");
  }
}

StageMemory predict(const Case& given, const Config& config) {
  PlanRequest request;
  request.config = config;
  request.model = layers();
  request.machine.ranks = kRanks;
  request.micro_batches = given.micro_batches;
  return memory_by_stage(request)[given.stage];
}

void check(const Case& given) {
  const TempDirectory directory;
  const Config config = config_of(given, directory.path());
  SCOPED_TRACE(fmt::format("stage {}, group {}, {} micro-batches, {}, gradients {}, nvme {}",
                           given.stage, given.group, given.micro_batches, name_of(given.policy),
                           static_cast<int>(given.gradients), given.uses_nvme));
  const StageMemory predicted = predict(given, config);
  ASSERT_EQ(predicted.obstacle + predicted.left_to_auto, "");
  for (const PhaseMarks& marks : measure(given, config)) {
    expect_formula(given, marks);
    expect_prediction(given, marks, predicted.most_in_use);
  }
}

TEST(StageMemory, MeteredIsThatOfTheFormulaAndOfThePlan) {
  for (std::uint32_t stage = 0; stage <= 3; ++stage) {
    for (const std::uint32_t micro_batches : {1u, 2u}) {
      if (stage == 1 && micro_batches == 1) continue;  // below
      check({.stage = stage, .micro_batches = micro_batches});
    }
    check({.stage = stage, .micro_batches = 2, .uses_nvme = false});
    check({.stage = stage, .group = 2, .micro_batches = 2});
  }
}

TEST(StageMemory, GradientsThatWaitElsewhereAreCountedThere) {
  for (const std::uint32_t stage : {2u, 3u}) {
    check({.stage = stage, .gradients = TierChoice::kNvme});
    check({.stage = stage, .gradients = TierChoice::kDevice});
  }
}

TEST(StageMemory, ShardsOnTheDeviceAreCountedThere) {
  check({.stage = 3,
         .micro_batches = 2,
         .gradients = TierChoice::kDevice,
         .uses_nvme = false,
         .is_on_device = true});
  check({.stage = 3,
         .group = 2,
         .gradients = TierChoice::kDevice,
         .uses_nvme = false,
         .is_on_device = true});
}

TEST(StageMemory, UnderOverlapThePlanIsALimit) {
  for (const std::uint32_t stage : {0u, 3u}) {
    for (const OverlapPolicy policy :
         {OverlapPolicy::kDeferred, OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
      const TempDirectory directory;
      const Case given{.stage = stage, .micro_batches = 2, .policy = policy};
      const Config config = config_of(given, directory.path());
      SCOPED_TRACE(fmt::format("stage {}, {}", stage, name_of(policy)));
      const PhaseMarks predicted = predict(given, config).most_in_use;
      for (const PhaseMarks& marks : measure(given, config))
        expect_prediction(given, marks, predicted);
    }
  }
}

// Stage 1 keeps room for all gradients. Where every use's gradient is reduced at once, it fills no
// more of it than stage 2 has.
TEST(StageMemory, AtStageOneOnlySumsOfMicroBatchesFillTheSet) {
  const TempDirectory directory;
  const Case given{.stage = 1};
  const Config config = config_of(given, directory.path());
  const PhaseMarks predicted = predict(given, config).most_in_use;
  for (const PhaseMarks& marks : measure(given, config)) {
    expect_near(of(marks, StepPhase::kBackward).most(MemoryKind::kGradients),
                2.0 * kParameters / kRanks, "gradients");
    expect_prediction(given, marks, predicted);
  }
}

}  // namespace
}  // namespace sluice::test
