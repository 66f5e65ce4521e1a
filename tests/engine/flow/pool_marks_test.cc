// The high-water marks of the pools: within the budgets in every phase, and what a hand can count
// where buffers are few.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/pool_meter.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

const PoolMarks& of(const PhaseMarks& marks, StepPhase phase) {
  return marks[static_cast<std::size_t>(phase)];
}

TEST(PoolMeter, KeepsTheMostOfEachPhaseAndTier) {
  PoolMeter meter;
  meter.set_capacity(MemoryPool::kWindow, 100);
  meter.set_capacity(MemoryPool::kGradientSlots, 100);
  meter.set_capacity(MemoryPool::kLanes, 10);
  meter.lend(MemoryPool::kWindow, 60);
  meter.lend(MemoryPool::kWindow, 40);
  meter.take_back(MemoryPool::kWindow, 60);
  meter.enter(StepPhase::kBackward);
  meter.lend(MemoryPool::kGradientSlots, 70);
  meter.lend(MemoryPool::kLanes, 10);
  meter.take_back(MemoryPool::kWindow, 40);
  const PhaseMarks marks = meter.take();
  EXPECT_EQ(of(marks, StepPhase::kForward).most(Tier::kDevice), 100u);
  EXPECT_EQ(of(marks, StepPhase::kForward).most(Tier::kHost), 0u);
  EXPECT_EQ(of(marks, StepPhase::kBackward).most(Tier::kDevice), 110u);
  EXPECT_EQ(of(marks, StepPhase::kBackward).most(MemoryPool::kWindow), 40u);
  EXPECT_EQ(of(marks, StepPhase::kBackward).most(Tier::kHost), 10u);
  EXPECT_EQ(of(marks, StepPhase::kOptimizer).most(Tier::kDevice), 0u);
  // A lent buffer counts from then on.
  EXPECT_EQ(of(meter.take(), StepPhase::kBackward).most(Tier::kDevice), 70u);
}

TEST(PoolMeterDeathTest, APoolLendsNoMoreThanItHas) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  PoolMeter meter;
  meter.set_capacity(MemoryPool::kLanes, 10);
  EXPECT_DEATH(meter.lend(MemoryPool::kLanes, 11), "a pool lends no more than it has");
}

TEST(PoolMarks, AreWithinTheBudgetsInEveryPhase) {
  for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                     OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
    for (const TierChoice gradients : {TierChoice::kHost, TierChoice::kNvme}) {
      SCOPED_TRACE(fmt::format("{}, gradients {}", name_of(policy),
                               gradients == TierChoice::kHost ? "host" : "nvme"));
      const TempDirectory directory;
      Config config = toy_config(directory.path());
      config.placement = {TierChoice::kNvme, TierChoice::kNvme, gradients};
      config.memory.device_bytes = 400_KiB;
      config.memory.host_bytes = 2_MiB;
      config.optimizer.overlap = policy;
      config.optimizer.lanes = 1;
      if (policy == OverlapPolicy::kEager) config.optimizer.clip_norm = 0;
      const ModelSpec model = toy_model();
      const auto device = make_host_device({.memory_bytes = 400_KiB});
      Engine engine(config, model, *device);
      const Placement& placement = placement_of(engine);
      const ToyResult result =
          run_toy(engine, model, *device, config, {.steps = 4, .micro_batches = 2});
      PhaseMarks most;
      for (const StepReport& report : result.reports) raise_marks(most, report.buffers);
      for (const PoolMarks& marks : most) {
        EXPECT_LE(marks.most(Tier::kDevice), *config.memory.device_bytes);
        EXPECT_LE(marks.most(Tier::kHost), *config.memory.host_bytes);
        EXPECT_LE(marks.most(MemoryPool::kWindow), placement.window_bytes);
      }
      const std::uint64_t lane = placement.lanes.slot_bytes + placement.lane_gradients.slot_bytes;
      const PoolMarks& forward = of(most, StepPhase::kForward);
      const PoolMarks& backward = of(most, StepPhase::kBackward);
      EXPECT_EQ(of(most, StepPhase::kOptimizer).most(MemoryPool::kLanes), lane);
      EXPECT_EQ(forward.most(MemoryPool::kLanes), policy == OverlapPolicy::kSerial ? 0 : lane);
      EXPECT_GE(backward.most(MemoryPool::kGradientSlots), placement.gradient_slots.slot_bytes);
      EXPECT_GE(forward.most(MemoryPool::kWindow),
                layout_of(engine).unit_parameter_bytes(UnitId{0}));
      EXPECT_GT(backward.most(MemoryPool::kGradientStaging), 0u) << "micro-batches are added";
    }
  }
}

Config marks_config(const TempDirectory& directory, OverlapPolicy policy) {
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme, TierChoice::kHost};
  config.memory.device_bytes = 1_MiB;
  config.memory.host_bytes = 4_MiB;
  config.optimizer.overlap = policy;
  return config;
}

std::uint64_t all_gradients(const Engine& engine, TierChoice tier) {
  std::uint64_t bytes = 0;
  for (const BlockPlace& block : layout_of(engine).blocks())
    bytes += tier == TierChoice::kNvme
                 ? layout_of(engine).gradient_slot_bytes(block.id)
                 : block.element_count * layout_of(engine).format().gradient_bytes();
  return bytes;
}

// Homes, from the first step on, and nothing else on storage.
TEST(PoolMarks, HomesAreThoseOfThePlacement) {
  for (const TierChoice home : {TierChoice::kDevice, TierChoice::kHost, TierChoice::kNvme}) {
    const TempDirectory directory;
    Config config = marks_config(directory, OverlapPolicy::kSerial);
    config.placement = {home, home, TierChoice::kAuto};
    config.memory.device_bytes = 8_MiB;
    const ModelSpec model = toy_model();
    const auto device = make_host_device({.memory_bytes = 8_MiB, .has_own_memory = true});
    Engine engine(config, model, *device);
    const Placement& placement = placement_of(engine);
    const ToyResult result = run_toy(engine, model, *device, config, {.steps = 2});
    for (const PoolMarks& marks : result.reports.front().buffers) {
      EXPECT_EQ(marks.most(MemoryKind::kParameters), placement.resident_parameter_bytes +
                                                         placement.host_parameter_bytes +
                                                         placement.nvme_parameter_bytes);
      EXPECT_EQ(marks.most(MemoryKind::kOptimizer), placement.device_record_bytes +
                                                        placement.host_record_bytes +
                                                        placement.nvme_record_bytes);
      EXPECT_GT(marks.most(home == TierChoice::kDevice ? Tier::kDevice
                           : home == TierChoice::kHost ? Tier::kHost
                                                       : Tier::kNvme),
                layout_of(engine).state_bytes() - 1);
      EXPECT_EQ(marks.most(Tier::kNvme), placement.nvme_bytes());
    }
  }
}

TEST(PoolMarks, GradientsWaitFromTheirFirstUseUntilTheirUpdate) {
  for (const TierChoice tier : {TierChoice::kDevice, TierChoice::kHost, TierChoice::kNvme}) {
    SCOPED_TRACE(static_cast<int>(tier));
    const TempDirectory directory;
    Config config = marks_config(directory, OverlapPolicy::kSerial);
    config.placement.gradients = tier;
    const ModelSpec model = toy_model();
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config, model, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const std::uint64_t all = all_gradients(engine, tier);
    for (int i = 0; i < 3; ++i) {
      {
        // Units that an abandoned step has brought are of no use.
        Step step = engine.begin_step({.learning_rate = 1e-2});
        if (i == 1) walk_step(step, model, engine, *device, stream, config, 1);
      }
      Step step = engine.begin_step({.learning_rate = 1e-2});
      walk_step(step, model, engine, *device, stream, config, 1);
      const PhaseMarks marks = step.finish().buffers;
      EXPECT_EQ(of(marks, StepPhase::kForward).most(MemoryKind::kGradients), 0u) << i;
      if (tier != TierChoice::kNvme) {  // those are written behind backward
        EXPECT_EQ(of(marks, StepPhase::kBackward).most(MemoryKind::kGradients), all);
      }
      EXPECT_EQ(of(marks, StepPhase::kOptimizer).most(MemoryKind::kGradients), all);
    }
  }
}

// A step that is skipped leaves no gradient that waits.
TEST(PoolMarks, SkippedGradientsWaitForNothing) {
  const TempDirectory directory;
  Config config = marks_config(directory, OverlapPolicy::kSerial);
  config.placement.gradients = TierChoice::kNvme;
  config.optimizer.non_finite = NonFinitePolicy::kSkip;
  const ModelSpec model = validated(toy_model());
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  for (int i = 0; i < 2; ++i) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(0));
      device->launch(stream.id(), [gradient] { gradient[0] = 0x7f80; });
    }
    const StepReport report = step.finish();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(of(report.buffers, StepPhase::kForward).most(MemoryPool::kNvmeGradients), 0u);
    EXPECT_EQ(of(report.buffers, StepPhase::kOptimizer).most(MemoryPool::kNvmeGradients),
              all_gradients(engine, TierChoice::kNvme));
  }
}

// Whether the norm lets them become home or not.
TEST(PoolMarks, ShadowsAreInUseUntilTheyAreAdoptedOrDropped) {
  for (const double clip_norm : {1e9, 1e-3}) {
    SCOPED_TRACE(clip_norm);
    const TempDirectory directory;
    Config config = marks_config(directory, OverlapPolicy::kSpeculative);
    config.optimizer.clip_norm = clip_norm;
    const ModelSpec model = toy_model();
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config, model, *device);
    const std::uint64_t homes =
        placement_of(engine).nvme_bytes() - placement_of(engine).shadow_bytes;
    // Between the steps an evaluation waits until all is home.
    const ToyResult result =
        run_toy(engine, model, *device, config, {.steps = 6, .evaluate = true});
    PhaseMarks most;
    for (const StepReport& report : result.reports) {
      EXPECT_EQ(report.redone, clip_norm < 1);
      EXPECT_EQ(of(report.buffers, StepPhase::kForward).most(MemoryPool::kShadows), 0u);
      EXPECT_EQ(of(report.buffers, StepPhase::kForward).most(Tier::kNvme), homes);
      raise_marks(most, report.buffers);
    }
    EXPECT_GT(of(most, StepPhase::kOptimizer).most(MemoryPool::kShadows), 0u);
    EXPECT_LE(of(most, StepPhase::kOptimizer).most(MemoryPool::kShadows),
              placement_of(engine).shadow_bytes);
  }
}

}  // namespace
}  // namespace sluice::test
