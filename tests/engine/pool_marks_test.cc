// The high-water marks of the pools: within the budgets in every phase, and what a hand can count
// where buffers are few.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "base/units.h"
#include "engine/pool_meter.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

const PoolMarks& of(const PhaseMarks& marks, StepPhase phase) {
  return marks[static_cast<std::size_t>(phase)];
}

TEST(PoolMeter, KeepsTheMostOfEachPhaseAndTier) {
  PoolMeter meter;
  meter.set_capacity(BufferPool::kWindow, 100);
  meter.set_capacity(BufferPool::kGradientSlots, 100);
  meter.set_capacity(BufferPool::kLanes, 10);
  meter.lend(BufferPool::kWindow, 60);
  meter.lend(BufferPool::kWindow, 40);
  meter.take_back(BufferPool::kWindow, 60);
  meter.enter(StepPhase::kBackward);
  meter.lend(BufferPool::kGradientSlots, 70);
  meter.lend(BufferPool::kLanes, 10);
  meter.take_back(BufferPool::kWindow, 40);
  const PhaseMarks marks = meter.take();
  EXPECT_EQ(of(marks, StepPhase::kForward).device_bytes, 100u);
  EXPECT_EQ(of(marks, StepPhase::kForward).host_bytes, 0u);
  EXPECT_EQ(of(marks, StepPhase::kBackward).device_bytes, 110u);
  EXPECT_EQ(of(marks, StepPhase::kBackward).most(BufferPool::kWindow), 40u);
  EXPECT_EQ(of(marks, StepPhase::kBackward).host_bytes, 10u);
  EXPECT_EQ(of(marks, StepPhase::kOptimizer).device_bytes, 0u);
  // What is lent still counts from then on.
  EXPECT_EQ(of(meter.take(), StepPhase::kBackward).device_bytes, 70u);
}

TEST(PoolMeterDeathTest, APoolLendsNoMoreThanItHas) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  PoolMeter meter;
  meter.set_capacity(BufferPool::kLanes, 10);
  EXPECT_DEATH(meter.lend(BufferPool::kLanes, 11), "a pool lends no more than it has");
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
      const Placement& placement = engine.placement();
      const ToyResult result =
          run_toy(engine, model, *device, config, {.steps = 4, .micro_batches = 2});
      PhaseMarks most;
      for (const StepReport& report : result.reports) raise_marks(most, report.buffers);
      for (const PoolMarks& marks : most) {
        EXPECT_LE(placement.device_home_bytes() + marks.device_bytes, *config.memory.device_bytes);
        EXPECT_LE(placement.host_home_bytes() + marks.host_bytes, *config.memory.host_bytes);
        EXPECT_LE(marks.most(BufferPool::kWindow), placement.window_bytes);
      }
      const std::uint64_t lane = placement.lanes.slot_bytes + placement.lane_gradients.slot_bytes;
      const PoolMarks& forward = of(most, StepPhase::kForward);
      const PoolMarks& backward = of(most, StepPhase::kBackward);
      EXPECT_EQ(of(most, StepPhase::kOptimizer).most(BufferPool::kLanes), lane);
      EXPECT_EQ(forward.most(BufferPool::kLanes), policy == OverlapPolicy::kSerial ? 0 : lane);
      EXPECT_GE(backward.most(BufferPool::kGradientSlots), placement.gradient_slots.slot_bytes);
      EXPECT_GE(forward.most(BufferPool::kWindow), engine.layout().unit_parameter_bytes(UnitId{0}));
      EXPECT_GT(backward.most(BufferPool::kGradientStaging), 0u) << "micro-batches are added";
    }
  }
}

}  // namespace
}  // namespace sluice::test
