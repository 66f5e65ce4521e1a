// A loss scale that moves, in the engine: gradients of the scaled loss in fp16. Steps that overflow
// change no bit on any rank; the others give the bits of training without a scale.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// A gradient of a few bits: what a power of two scales exactly, in fp16 as long as it fits.
float mean_gradient(std::uint64_t step, std::uint64_t index) {
  return static_cast<float>(static_cast<int>((index + 7 * step) % 13) - 6) * 0.25f;
}

struct ScaledRun {
  std::vector<StateBytes> states;  // after each step
  std::vector<StepReport> reports;
};

// Every unit's gradient is that of its number of applied steps, so a skipped step is made again.
ScaledRun run_scaled(Engine& engine, HostDevice& device, const Config& config, int steps,
                     bool is_overflowing) {
  ScaledRun run;
  const ModelSpec model = validated(toy_model());
  engine.initialize(toy_values());
  const Stream stream(device, "compute");
  for (int i = 0; i < steps; ++i) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    const auto scale = static_cast<float>(step.loss_scale());
    const auto walk = [&](const std::vector<UnitId>& units, Pass pass) {
      for (const UnitId unit : units) {
        const Lease lease = step.acquire(unit, pass, stream);
        if (pass == Pass::kForward) continue;
        const auto tensors = layout_of(engine).tensors_of(unit);
        for (std::size_t t = 0; t < tensors.size(); ++t) {
          device.launch(stream.id(), [&config, gradient = lease.gradient(t), scale, is_overflowing,
                                      number = step.number(), count = tensors[t].element_count] {
            for (std::uint64_t e = 0; e < count; ++e) {
              float value = mean_gradient(number, e) * scale;
              if (!is_overflowing) value = std::clamp(value, -60000.0f, 60000.0f);
              if (config.precision.gradients == DType::kFp32) {
                reinterpret_cast<float*>(gradient)[e] = value;
              } else {
                reinterpret_cast<std::uint16_t*>(gradient)[e] = fp16_from_float(value);
              }
            }
          });
        }
      }
    };
    walk(model.forward_order, Pass::kForward);
    walk(model.backward_order, Pass::kBackward);
    run.reports.push_back(step.finish());
    run.states.push_back(read_state(engine));
  }
  return run;
}

Config scaled_config(const std::string& path, double static_scale) {
  Config config = sharded_config(path, 3, true, DType::kFp16);
  config.precision.loss_scale = {
      .static_scale = static_scale, .initial_scale_power = 18, .window = 3, .hysteresis = 1};
  return config;
}

class LossScaleInTheEngine : public testing::TestWithParam<TierChoice> {};

TEST_P(LossScaleInTheEngine, OverflowsChangeNothingAndTheRestIsExact) {
  const TempDirectory directory;
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const Config plain = scaled_config(directory.path(), 1);
  Config scaled = scaled_config(directory.path(), 0);
  if (GetParam() == TierChoice::kDevice) scaled.placement = {.optimizer = TierChoice::kDevice};
  Engine plain_engine(plain, toy_model(), *device);
  const ScaledRun expected = run_scaled(plain_engine, *device, plain, 6, true);
  const auto second_device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(scaled, toy_model(), *second_device);
  const ScaledRun actual = run_scaled(engine, *second_device, scaled, 12, true);
  std::size_t applied = 0;
  double scale = 0x1p18;
  std::uint32_t good = 0;
  for (std::size_t i = 0; i < actual.reports.size() && applied < expected.states.size(); ++i) {
    const StepReport& report = actual.reports[i];
    EXPECT_EQ(report.loss_scale, scale) << i;
    // Units are used at most twice: 2 * 1.5 * 2^14 fits fp16, and 1.5 * 2^16 does not.
    EXPECT_EQ(report.skipped, scale >= 0x1p15) << i;
    if (report.skipped) {
      scale /= 2;
      good = 0;
      if (i != 0) {
        EXPECT_TRUE(actual.states[i] == actual.states[i - 1]) << i;
      }
      continue;
    }
    EXPECT_TRUE(actual.states[i] == expected.states[applied]) << i;
    EXPECT_EQ(report.gradient_norm, expected.reports[applied].gradient_norm) << i;
    ++applied;
    if (++good == 3) {
      scale *= 2;
      good = 0;
    }
  }
  EXPECT_GE(applied, 5u);
}

INSTANTIATE_TEST_SUITE_P(State, LossScaleInTheEngine,
                         testing::Values(TierChoice::kNvme, TierChoice::kDevice),
                         [](const auto& value) {
                           return value.param == TierChoice::kNvme ? "nvme" : "device";
                         });

// One rank's gradients overflow: all skip, and all lower the scale.
TEST(LossScaleOfRanks, OverflowOnOneRankSkipsTheStepOnAll) {
  LocalWorld world(2, {.timeout_s = 20, .sum = sum_in_order});
  std::vector<ScaledRun> runs(2);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const TempDirectory directory;
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      const Config config = scaled_config(directory.path(), 0);
      Engine engine(config, toy_model(), *device, collectives.get());
      runs[rank] = run_scaled(engine, *device, config, 4, /*is_overflowing=*/rank == 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(runs[0].reports[i].skipped, runs[1].reports[i].skipped) << i;
    EXPECT_EQ(runs[0].reports[i].loss_scale, runs[1].reports[i].loss_scale) << i;
    EXPECT_TRUE(runs[0].states[i] == runs[1].states[i]) << i;
  }
  EXPECT_TRUE(runs[0].reports[0].skipped);
  EXPECT_TRUE(runs[0].reports[1].skipped);
  EXPECT_TRUE(runs[0].states[1] == runs[0].states[0]);
}

}  // namespace
}  // namespace sluice::test
