// Exactness beside the matrix (exactness_test.cc): clipping, reads between steps, orders of
// micro-batches, every optimizer, groups, and random delays.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "tests/engine/exactness_cases.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// Clipping that never bites, and none at all.
TEST(ExactnessOfClipping, EveryBoundGivesTheOraclesBits) {
  for (const double clip_norm : {0.0, 1e-3, 1e9}) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.optimizer.clip_norm = clip_norm;
    const ToyOptions options{.steps = 3};
    EXPECT_TRUE(same_training(run_toy(config, options), toy_oracle(config, options))) << clip_norm;
  }
}

// One small tensor read again and again: its block may still lie in a lane from the last time, but
// the step has moved on.
TEST(ExactnessOfReads, ReadingBetweenStepsSeesEachStep) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  const ModelSpec model = toy_model();
  const auto device = make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 0});
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  const TensorPlace& scale = engine.tensors().back();
  ASSERT_EQ(scale.name, "scale");
  const auto read = [&] {
    float master = 0;
    engine.read_state(scale.id, StateKind::kMaster, 0,
                      std::as_writable_bytes(std::span(&master, 1)));
    return master;
  };
  (void)read();
  for (std::uint32_t steps = 1; steps <= 3; ++steps) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, model, engine, *device, stream, config, 1);
    (void)step.finish();
    // The last tensor's state is at the end: bf16 parameter, master, exp_avg, exp_avg_sq.
    const StateBytes expected = toy_oracle(config, {.steps = steps}).state;
    float master = 0;
    std::memcpy(&master, expected.data() + expected.size() - 12, sizeof master);
    EXPECT_EQ(read(), master) << "step " << steps;
  }
}

// Vertical order gives what it says in its own order of additions, with the parameter traffic of
// one micro-batch.
TEST(ExactnessOfOrders, VerticalMicroBatchesGiveTheOraclesBits) {
  for (const PolicyCase& policy : kPolicies) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.optimizer.overlap = policy.policy;
    config.optimizer.clip_norm = clip_norm_of(policy, 4);
    kCases[4].change(config);
    config.memory.device_bytes = 400_KiB;
    const ToyOptions options{.steps = 3, .micro_batches = 4, .order = MicroBatchOrder::kVertical};
    const ToyResult actual = run_toy(config, options);
    EXPECT_TRUE(same_training(actual, toy_oracle(config, options))) << policy.name;
    const ToyResult one = run_toy(config, {.steps = 1});
    EXPECT_EQ(actual.predicted.nvme_read_bytes, one.predicted.nvme_read_bytes) << policy.name;
  }
}

// Where backward uses every unit once, both orders add alike.
TEST(ExactnessOfOrders, WithoutTiedWeightsBothOrdersGiveTheSameBits) {
  ModelSpec model = toy_model();
  model.forward_order.pop_back();  // the head
  StateBytes states[2];
  for (const MicroBatchOrder order : {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    const auto device = make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 0});
    Engine engine(config, model, *device);
    const ToyOptions options{.steps = 3, .micro_batches = 3, .order = order};
    states[static_cast<int>(order)] = run_toy(engine, model, *device, config, options).state;
  }
  EXPECT_TRUE(states[0] == states[1]);
}

// The other optimizers keep other records; each has them in memory and on storage.
TEST(ExactnessOfOptimizers, EveryKindGivesTheOraclesBitsInEveryPlacement) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdam, OptimizerKind::kLion, OptimizerKind::kAdagrad, OptimizerKind::kSgd}) {
    for (const DType parameters : {DType::kBf16, DType::kFp32, DType::kFp16}) {
      for (const std::size_t placement : {0u, 4u, 8u}) {
        const TempDirectory directory;
        Config config = toy_config(directory.path());
        config.optimizer.kind = kind;
        config.optimizer.overlap = OverlapPolicy::kSerial;
        config.precision.parameters = parameters;
        kCases[placement].change(config);
        const ToyOptions options{.steps = 3, .micro_batches = 2};
        const ToyResult actual = run_toy(config, options);
        EXPECT_TRUE(same_training(actual, toy_oracle(config, options)))
            << name_of(kind) << " " << name_of(parameters) << " " << kCases[placement].name;
        EXPECT_EQ(actual.reports.back().nvme_read_bytes, actual.predicted.nvme_read_bytes);
      }
    }
  }
}

// Moments in 8 bits have groups that begin with their tensors, so blocks cut between groups.
// Moments in bf16 are rounded with random bits that belong to the element of the tensor. The oracle
// knows tensors and no blocks.
class ExactnessOfStates : public testing::TestWithParam<OptimizerState> {};

TEST_P(ExactnessOfStates, GivesTheOraclesBitsInEveryPlacement) {
  for (const Case& placement : kCases) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.optimizer.state = GetParam();
    config.optimizer.rounding_seed = 7;
    config.optimizer.overlap = OverlapPolicy::kSerial;
    placement.change(config);
    const ToyOptions options{.steps = 3, .micro_batches = 2, .has_own_memory = placement.is_gpu};
    const ToyResult actual = run_toy(config, options);
    EXPECT_TRUE(same_training(actual, toy_oracle(config, options))) << placement.name;
    EXPECT_EQ(actual.reports.back().nvme_read_bytes, actual.predicted.nvme_read_bytes)
        << placement.name;
    EXPECT_EQ(actual.reports.back().nvme_write_bytes, actual.predicted.nvme_write_bytes)
        << placement.name;
  }
}

TEST_P(ExactnessOfStates, GivesTheOraclesBitsUnderEveryPolicy) {
  for (const PolicyCase& policy : kPolicies) {
    for (const std::size_t placement : {2u, 4u, 9u, 13u}) {
      const TempDirectory directory;
      Config config = toy_config(directory.path());
      config.optimizer.state = GetParam();
      config.optimizer.rounding_seed = 7;
      config.optimizer.overlap = policy.policy;
      config.optimizer.clip_norm = clip_norm_of(policy, 2);
      kCases[placement].change(config);
      const ToyOptions options{.steps = 3, .micro_batches = 2};
      EXPECT_TRUE(same_training(run_toy(config, options), toy_oracle(config, options)))
          << policy.name << " " << kCases[placement].name;
    }
  }
}

TEST_P(ExactnessOfStates, GivesTheOraclesBitsWithEveryOptimizer) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdam, OptimizerKind::kLion, OptimizerKind::kAdagrad, OptimizerKind::kSgd}) {
    for (const DType parameters : {DType::kBf16, DType::kFp32, DType::kFp16}) {
      for (const std::size_t placement : {4u, 13u}) {
        const TempDirectory directory;
        Config config = toy_config(directory.path());
        config.optimizer.kind = kind;
        config.optimizer.state = GetParam();
        config.optimizer.rounding_seed = 7;
        config.precision.parameters = parameters;
        kCases[placement].change(config);
        const ToyOptions options{.steps = 3};
        EXPECT_TRUE(same_training(run_toy(config, options), toy_oracle(config, options)))
            << name_of(kind) << " " << name_of(parameters) << " " << kCases[placement].name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(States, ExactnessOfStates,
                         testing::Values(OptimizerState::kBf16, OptimizerState::k8bit),
                         [](const auto& state) {
                           return "With_" + std::string(name_of(state.param));
                         });

// Under overlap the traffic depends on timing, within bounds; a step done again adds its update
// once more.
TEST(ExactnessOfTraffic, OverlapMovesWhatIsPredicted) {
  for (const PolicyCase& policy : kPolicies) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    kCases[4].change(config);
    config.memory.device_bytes = 400_KiB;
    config.optimizer.overlap = policy.policy;
    config.optimizer.clip_norm = clip_norm_of(policy, 1);
    const IoQueue* queue_seen = nullptr;
    const auto device = make_host_device({.memory_bytes = 400_KiB, .copy_bytes_per_second = 0});
    const ModelSpec model = toy_model();
    Engine engine =
        EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          queue_seen = queue.get();
          return queue;
        });
    engine.initialize(toy_values());
    const IoCounters before = queue_seen->counters();
    const Stream stream(*device, "compute");
    std::uint64_t redone = 0;
    constexpr std::uint64_t kSteps = 4;
    for (std::uint64_t i = 0; i < kSteps; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      walk_step(step, model, engine, *device, stream, config, 1);
      redone += step.finish().redone ? 1 : 0;
    }
    engine.drain();
    const IoCounters after = queue_seen->counters();
    const Traffic one = engine.predicted_traffic(1);
    const std::uint64_t write_bytes = after.write_bytes - before.write_bytes;
    const std::uint64_t read_bytes = after.read_bytes - before.read_bytes;
    // In a step done again, a write that had not been started counts once.
    EXPECT_GE(write_bytes, kSteps * one.nvme_write_bytes) << policy.name;
    EXPECT_LE(write_bytes, (kSteps + redone) * one.nvme_write_bytes) << policy.name;
    EXPECT_GE(read_bytes, kSteps * one.nvme_read_bytes_least) << policy.name;
    EXPECT_LE(read_bytes, kSteps * one.nvme_read_bytes + redone * one.nvme_write_bytes)
        << policy.name;
    if (policy.policy == OverlapPolicy::kSerial) {
      EXPECT_EQ(one.nvme_read_bytes_least, one.nvme_read_bytes);
    }
    if (policy.name == "speculative_redone") {
      EXPECT_EQ(redone, kSteps);
    }
    if (policy.name == "speculative_sometimes") {
      EXPECT_GT(redone, 0u);
      EXPECT_LT(redone, kSteps);
    }
  }
}

// Hyperparameters by group change in the middle of units and of blocks.
TEST(ExactnessOfGroups, EveryGroupGivesTheOraclesBitsInEveryPlacement) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kAdam, OptimizerKind::kLion, OptimizerKind::kSgd}) {
    StateBytes in_memory;
    for (const Case& placement : {kCases[0], kCases[4], kCases[8], kCases[10]}) {
      const TempDirectory directory;
      Config config = toy_config(directory.path());
      config.optimizer.overlap =
          kind == OptimizerKind::kLion ? OverlapPolicy::kSpeculative : OverlapPolicy::kSerial;
      config.optimizer.kind = kind;
      config.optimizer.groups = {
          {.tensors = {"wpe", "h.?.bias"}, .learning_rate_factor = 0.25, .weight_decay = 0.3},
          {.tensors = {"h.2.*"}, .learning_rate_factor = 3},
          {.tensors = {"*ln"}, .weight_decay = 0.2},
          {.tensors = {"scale"}, .learning_rate_factor = 0}};
      placement.change(config);
      const ToyOptions options{.steps = 3, .micro_batches = 2};
      const ToyResult trained = run_toy(config, options);
      EXPECT_TRUE(same_training(trained, toy_oracle(config, options)))
          << name_of(kind) << " " << placement.name;
      const StateBytes& actual = trained.state;
      if (in_memory.empty()) in_memory = actual;
      EXPECT_TRUE(actual == in_memory) << name_of(kind) << " " << placement.name;
      config.optimizer.groups.clear();
      EXPECT_FALSE(actual == toy_oracle(config, options).state) << "the groups do nothing";
    }
  }
}

// Below the largest gradient norm of the steps, and above the least.
double middle_norm(const ToyOptions& options) {
  Config config = toy_config("");
  config.optimizer.clip_norm = 0;
  const auto [least, most] =
      std::ranges::minmax(toy_oracle(config, options).reports, {}, &StepReport::gradient_norm);
  return (least.gradient_norm + most.gradient_norm) / 2;
}

// Random delays of transfers and of the device's work reorder every completion, with one to three
// leases held; the seed is in the message.
class ExactnessUnderDelays : public testing::TestWithParam<PolicyCase> {};

TEST_P(ExactnessUnderDelays, AnyOrderOfCompletionsGivesTheSameBits) {
  const ToyOptions options{
      .steps = 3, .micro_batches = 2, .evaluate = true, .size = ToySize::kSmall};
  const TempDirectory directory;
  Config common = toy_config(directory.path());
  common.optimizer.overlap = GetParam().policy;
  const bool bites_sometimes = GetParam().clip_norm == kBitesSometimes;
  common.optimizer.clip_norm = bites_sometimes ? middle_norm(options) : GetParam().clip_norm;
  common.placement = {TierChoice::kNvme, TierChoice::kNvme};
  common.memory.host_bytes = 1_MiB;
  const ToyResult expected = toy_oracle(common, options);
  const auto clipped = std::ranges::count_if(
      expected.reports, [](const StepReport& report) { return report.clip_factor < 1; });
  EXPECT_EQ(bites_sometimes, clipped > 0 && clipped < std::ssize(expected.reports));
  side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
    Config config = common;
    ToyOptions own = options;
    own.leases = static_cast<std::uint32_t>(1 + seed % 3);
    const ModelSpec model = toy_model_of(own);
    config.memory.device_bytes = 140_KiB + seed % 3 * 40_KiB;
    const auto device = make_delayed_device(
        make_host_device({.memory_bytes = *config.memory.device_bytes}), seed, 200);
    Engine engine =
        EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.seed = seed, .delay_us_max = 200});
        });
    EXPECT_TRUE(same_training(run_toy(engine, model, *device, config, own), expected))
        << "seed " << seed;
  });
}

INSTANTIATE_TEST_SUITE_P(Policies, ExactnessUnderDelays, testing::ValuesIn(kPolicies),
                         [](const auto& value) { return value.param.name; });

// Uses of one unit on several streams, with nothing between these streams: what the unit and its
// gradient wait for is all of them. The next step waits for those without a gradient too.
TEST(ExactnessOfStreams, UsesOnSeveralStreamsGiveTheOraclesBits) {
  side_by_side(seeds_of(campaign(60)), [](std::uint64_t seed) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.optimizer.overlap = seed % 2 == 0 ? OverlapPolicy::kEager : OverlapPolicy::kDeferred;
    config.optimizer.clip_norm = 0;
    config.memory.device_bytes = 220_KiB;
    const ToyOptions options{
        .steps = 3,
        .micro_batches = 2,
        .order = seed % 4 < 2 ? MicroBatchOrder::kVertical : MicroBatchOrder::kHorizontal,
        .evaluate = seed % 3 == 0,
        .frozen_units = seed % 2 == 0 ? std::vector<std::uint32_t>{} : std::vector{1u, 3u},
        .size = ToySize::kSmall,
        .leases = 2,
        .streams = 2};
    const ModelSpec model = toy_model_of(options);
    const auto device = make_delayed_device(
        make_host_device({.memory_bytes = *config.memory.device_bytes}), seed, 1000);
    Engine engine(config, model, *device);
    EXPECT_TRUE(same_training(run_toy(engine, model, *device, config, options),
                              toy_oracle(config, options)))
        << "seed " << seed;
  });
}

}  // namespace
}  // namespace sluice::test
