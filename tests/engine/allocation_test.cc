// The allocations of a step once a run is steady. CONTRIBUTING.md: nothing that holds parameters,
// state, gradients or activations, or grows with them. The engine runs with blocks of two sizes, as
// many of each, and operator new is counted. The test's own computation is counted with it.
#include <cstdint>
#include <string>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "tests/support/counted_new.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kUnits = 6;
constexpr std::uint64_t kBlocksOfUnit = 4;

ModelSpec model_of(std::uint64_t block_elements) {
  ModelSpec model;
  for (std::uint32_t i = 0; i < kUnits; ++i) {
    const std::string name = fmt::format("h.{}", i);
    model.units.push_back(
        {name, {{.name = name + ".w", .shape = {kBlocksOfUnit * block_elements}}}});
    model.forward_order.push_back(UnitId{i});
  }
  return model;
}

// Counts and bytes are of one step.
Allocations allocations_of(OverlapPolicy policy, std::uint64_t block_elements) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.storage.block_elements = block_elements;
  config.optimizer.overlap = policy;
  config.optimizer.clip_norm = policy == OverlapPolicy::kEager ? 0 : 1e6;
  config.memory.device_bytes = 4 * kBlocksOfUnit * block_elements * 4;
  const auto device = make_host_device({.memory_bytes = *config.memory.device_bytes});
  const ModelSpec model = model_of(block_elements);
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  const auto run_steps = [&](int steps) {
    for (int i = 0; i < steps; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-3});
      walk_step(step, model, engine, *device, stream, config, 1);
      (void)step.finish();
    }
  };
  run_steps(3);
  engine.drain();
  constexpr std::uint64_t kSteps = 4;
  count_allocations();
  run_steps(kSteps);
  engine.drain();
  Allocations counted = allocations();
  counted.count /= kSteps;
  counted.bytes /= kSteps;
  return counted;
}

class AllocationTest : public testing::TestWithParam<OverlapPolicy> {};

TEST_P(AllocationTest, NothingInAStepGrowsWithTheState) {
  constexpr std::uint64_t kSmall = 32'768, kLarge = 4 * kSmall;  // elements of a block
  const Allocations small = allocations_of(GetParam(), kSmall);
  const Allocations large = allocations_of(GetParam(), kLarge);
  const std::string figures = fmt::format(
      "blocks of {}: {} allocations, {} bytes a step, {} at most; of {}: {}, {}, {}", kSmall,
      small.count, small.bytes, small.largest_bytes, kLarge, large.count, large.bytes,
      large.largest_bytes);
  RecordProperty("allocations", figures);
  EXPECT_GT(small.count, 0u) << "nothing is counted";
  // Lists grow to the longest that timing has asked for; the longest is a stream's queue of tasks.
  // The parameters of the smaller block alone are twice as large as this.
  EXPECT_LE(large.largest_bytes, 32_KiB) << figures;
  EXPECT_LE(small.largest_bytes, 32_KiB) << figures;
  // One block's parameters in a step would be 256 KiB.
  EXPECT_LE(large.bytes, small.bytes + 64_KiB) << figures;
  // Units, uses and blocks, each a few times.
  EXPECT_LE(small.count, 20 * kUnits * kBlocksOfUnit) << figures;
  EXPECT_LE(large.count, 20 * kUnits * kBlocksOfUnit) << figures;
}

INSTANTIATE_TEST_SUITE_P(Policies, AllocationTest,
                         testing::Values(OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                         OverlapPolicy::kEager, OverlapPolicy::kSpeculative),
                         [](const auto& policy) { return std::string(name_of(policy.param)); });

}  // namespace
}  // namespace sluice::test
