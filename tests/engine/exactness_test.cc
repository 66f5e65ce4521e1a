// The central promise: wherever the state lives, training gives the bits of training in memory.
#include <gtest/gtest.h>

#include <cstring>

#include "base/units.h"
#include "tests/support/campaign.h"
#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

struct Case {
  std::string name;
  void (*change)(Config& config);
  bool is_gpu = false;  // as far as the engine can tell
};

void PrintTo(const Case& value, std::ostream* out) {
  *out << value.name;
}

const Case kCases[] = {
    {"in_memory",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kHost};
     }},
    {"parameters_host",
     [](Config& c) {
       c.placement = {TierChoice::kHost, TierChoice::kHost};
     }},
    {"parameters_nvme",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kHost};
     }},
    {"optimizer_nvme",
     [](Config& c) {
       c.placement = {TierChoice::kDevice, TierChoice::kNvme};
     }},
    {"all_nvme",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
     }},
    {"all_nvme_sync",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.backend = IoBackend::kSync;
     }},
    {"all_nvme_one_thread",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.threads = 1;
     }},
    {"all_nvme_depth_1",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.queue_depth = 1;
     }},
    {"all_nvme_large_blocks",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.block_elements = 65536;
     }},
    {"small_budgets",
     [](Config& c) {
       c.memory.device_bytes = 300_KiB;
       c.memory.host_bytes = 900_KiB;
     }},
    {"medium_budgets",
     [](Config& c) {
       c.memory.device_bytes = 350_KiB;
       c.memory.host_bytes = 1200_KiB;
     }},
    {"large_host_budget",
     [](Config& c) {
       c.memory.device_bytes = 300_KiB;
       c.memory.host_bytes = 8_MiB;
     }},
    {"two_paths",
     [](Config& c) {
       c.placement = {TierChoice::kNvme, TierChoice::kNvme};
       c.storage.paths.push_back(c.storage.paths[0]);
     }},
    {"all_device", [](Config& c) { c.placement.optimizer = TierChoice::kDevice; }},
    {"device_and_host", [](Config& c) { c.memory.device_bytes = 1400_KiB; }, true},
    {"device_and_nvme",
     [](Config& c) { c.memory = {.device_bytes = 1400_KiB, .host_bytes = 600_KiB}; }, true},
};

// A policy, and a bound on the norm: 0 = none, else one that never, sometimes or always bites.
struct PolicyCase {
  std::string name;
  OverlapPolicy policy = OverlapPolicy::kSerial;
  double clip_norm = 1;
};

void PrintTo(const PolicyCase& value, std::ostream* out) {
  *out << value.name;
}

// Between the gradient norms of the toy's first steps.
constexpr double kBitesSometimes = -1;
double bound_that_bites_sometimes(std::uint32_t micro_batches) {
  switch (micro_batches) {
    case 1: return 221.9;
    case 2: return 164.3;
    default: return 125.92;
  }
}

constexpr double kNeverBites = 1e9;

double clip_norm_of(const PolicyCase& policy, std::uint32_t micro_batches) {
  return policy.clip_norm == kBitesSometimes ? bound_that_bites_sometimes(micro_batches)
                                             : policy.clip_norm;
}

const PolicyCase kPolicies[] = {
    {"serial", OverlapPolicy::kSerial, 1},
    {"deferred", OverlapPolicy::kDeferred, 1},
    {"eager", OverlapPolicy::kEager, 0},
    {"speculative_redone", OverlapPolicy::kSpeculative, 1},
    {"speculative_sometimes", OverlapPolicy::kSpeculative, kBitesSometimes},
    {"speculative_adopted", OverlapPolicy::kSpeculative, kNeverBites},
};

class Exactness
    : public testing::TestWithParam<std::tuple<Case, PolicyCase, DType, DType, std::uint32_t>> {};

TEST_P(Exactness, EqualsTheOracleBitForBit) {
  const auto& [placement, policy, parameters, gradients, micro_batches] = GetParam();
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.optimizer.overlap = policy.policy;
  config.optimizer.clip_norm = clip_norm_of(policy, micro_batches);
  config.precision = {.parameters = parameters, .gradients = gradients};
  if (parameters == DType::kFp32) config.memory.host_bytes = 16_MiB;
  placement.change(config);
  if (parameters == DType::kFp32 && config.memory.device_bytes) *config.memory.device_bytes *= 2;
  if (gradients == DType::kFp32 && config.memory.host_bytes < 2_MiB)
    *config.memory.host_bytes += 300_KiB;
  const ToyOptions options{.steps = 4,
                           .micro_batches = micro_batches,
                           .evaluate = true,
                           .has_own_memory = placement.is_gpu};

  const ToyResult expected = toy_oracle(config, options);
  const ToyResult actual = run_toy(config, options);

  EXPECT_TRUE(actual.state == expected.state);
  ASSERT_EQ(actual.reports.size(), expected.reports.size());
  for (std::size_t i = 0; i < actual.reports.size(); ++i) {
    EXPECT_EQ(actual.reports[i].gradient_norm, expected.reports[i].gradient_norm);
    EXPECT_EQ(actual.reports[i].clip_factor, expected.reports[i].clip_factor);
    EXPECT_EQ(actual.reports[i].policy, policy.policy);
    if (policy.policy != OverlapPolicy::kSerial) continue;
    EXPECT_EQ(actual.reports[i].nvme_read_bytes, actual.predicted.nvme_read_bytes);
    EXPECT_EQ(actual.reports[i].nvme_write_bytes, actual.predicted.nvme_write_bytes);
  }
}

std::string case_name(const testing::TestParamInfo<Exactness::ParamType>& info) {
  const auto& [placement, policy, parameters, gradients, micro_batches] = info.param;
  return placement.name + "_" + policy.name + "_" + std::string(name_of(parameters)) + "_" +
         std::string(name_of(gradients)) + "_" + std::to_string(micro_batches) + "mb";
}

INSTANTIATE_TEST_SUITE_P(Placements, Exactness,
                         testing::Combine(testing::ValuesIn(kCases), testing::ValuesIn(kPolicies),
                                          testing::Values(DType::kBf16, DType::kFp32),
                                          testing::Values(DType::kBf16), testing::Values(1u, 4u)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Fp32Gradients, Exactness,
                         testing::Combine(testing::Values(kCases[0], kCases[4], kCases[9]),
                                          testing::Values(kPolicies[0], kPolicies[1]),
                                          testing::Values(DType::kBf16, DType::kFp32, DType::kFp16),
                                          testing::Values(DType::kFp32), testing::Values(1u, 4u)),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Fp16, Exactness,
                         testing::Combine(testing::ValuesIn(kCases), testing::ValuesIn(kPolicies),
                                          testing::Values(DType::kFp16),
                                          testing::Values(DType::kFp16), testing::Values(4u)),
                         case_name);

// Clipping that never bites, and none at all.
TEST(ExactnessOfClipping, EveryBoundGivesTheOraclesBits) {
  for (const double clip_norm : {0.0, 1e-3, 1e9}) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config.optimizer.clip_norm = clip_norm;
    const ToyOptions options{.steps = 3};
    EXPECT_TRUE(run_toy(config, options).state == toy_oracle(config, options).state) << clip_norm;
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
  const TensorPlace& scale = engine.layout().tensors().back();
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
    EXPECT_TRUE(actual.state == toy_oracle(config, options).state) << policy.name;
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
        EXPECT_TRUE(actual.state == toy_oracle(config, options).state)
            << name_of(kind) << " " << name_of(parameters) << " " << kCases[placement].name;
        EXPECT_EQ(actual.reports.back().nvme_read_bytes, actual.predicted.nvme_read_bytes);
      }
    }
  }
}

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
    Engine engine(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
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
    // Of a step done again, what had not been started counts once.
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
      const StateBytes actual = run_toy(config, options).state;
      EXPECT_TRUE(actual == toy_oracle(config, options).state)
          << name_of(kind) << " " << placement.name;
      if (in_memory.empty()) in_memory = actual;
      EXPECT_TRUE(actual == in_memory) << name_of(kind) << " " << placement.name;
      config.optimizer.groups.clear();
      EXPECT_FALSE(actual == toy_oracle(config, options).state) << "the groups do nothing";
    }
  }
}

// Random delays reorder every completion; the seed is in the message.
class ExactnessUnderDelays : public testing::TestWithParam<PolicyCase> {};

TEST_P(ExactnessUnderDelays, AnyOrderOfCompletionsGivesTheSameBits) {
  const ToyOptions options{.steps = 3, .micro_batches = 2, .evaluate = false};
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.optimizer.overlap = GetParam().policy;
  config.optimizer.clip_norm = clip_norm_of(GetParam(), options.micro_batches);
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 350_KiB;
  config.memory.host_bytes = 1_MiB;
  const StateBytes expected = toy_oracle(config, options).state;
  const Campaign seeds = campaign(6);
  for (std::uint64_t seed = seeds.first_seed; seed < seeds.first_seed + seeds.cases; ++seed) {
    const auto device =
        make_host_device({.memory_bytes = *config.memory.device_bytes, .copy_bytes_per_second = 0});
    const ModelSpec model = toy_model();
    Engine engine(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
      return make_fault_queue(std::move(queue), {.seed = seed, .delay_us_max = 200});
    });
    EXPECT_TRUE(run_toy(engine, model, *device, config, options).state == expected)
        << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, ExactnessUnderDelays, testing::ValuesIn(kPolicies),
                         [](const auto& value) { return value.param.name; });

}  // namespace
}  // namespace sluice::test
