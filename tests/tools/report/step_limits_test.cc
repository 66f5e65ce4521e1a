// The rates behind T_min and T_bound are those of training, whatever a run does between its steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_over_queue.h"
#include "io/throttled_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"
#include "tools/report/step_limits.h"

namespace sluice::test {
namespace {

constexpr double kDriveRate = 20e6;

struct Measured {
  Rates rates;
  std::int64_t busy_before_ns = 0;  // of storage between the steps
};

// Over a drive of one rate, for reads and writes in turn.
Measured measured(bool evaluates, const LimitCalibration& calibration = {}) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.device_bytes = 400_KiB;
  config.optimizer.overlap = OverlapPolicy::kDeferred;
  const ModelSpec model = toy_model();
  const auto device = make_host_device({.memory_bytes = 400_KiB});
  Engine engine = EngineOverQueue::make(config, model, *device, [](std::unique_ptr<IoQueue> queue) {
    const auto rate = static_cast<std::uint64_t>(kDriveRate);
    return make_throttled_queue(
        std::move(queue),
        {.read_bytes_per_second = rate, .write_bytes_per_second = rate, .duplex = Duplex::kHalf});
  });
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  LimitMeter meter(engine, validated(model), 1, MicroBatchOrder::kHorizontal, calibration);
  Measured result;
  // Enough of them: the emulated drive counts bytes a little before it has moved them.
  for (int i = 0; i < 10; ++i) {
    meter.step_begins();
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, validated(model), engine, *device, stream, config, 1);
    const StepReport report = step.finish();
    meter.note(report);
    result.busy_before_ns += report.times.work_before.busy(Work::kStorage);
    if (!evaluates) continue;
    Inference inference = engine.begin_inference();
    for (const UnitId unit : validated(model).forward_order) (void)inference.acquire(unit, stream);
    trace_span({.end_ns = 1, .size_bytes = 1024_GiB, .kind = TraceKind::kCopyToDevice});
  }
  result.rates = meter.limits()->rates;
  return result;
}

// Two ranks of a host have half of a calibration's rates each, and a run on one of its drives those
// of that drive.
TEST(LimitMeter, ACalibrationIsSharedAmongTheRanksOfAHost) {
  const TempDirectory directory;
  const std::string file = directory.path() + "/io.json";
  std::ofstream(file) << R"({"best": {"read": {"bytes_per_second": 4e6},
                                      "write": {"bytes_per_second": 4e6}},
                             "interference": 1.0,
                             "drives": [{"path": "/x/a", "read": 3e6, "write": 3e6},
                                        {"path": "/x/b", "read": 1e6, "write": 1e6}]})";
  const auto rate = [&](const LimitCalibration& calibration) {
    return measured(false, calibration).rates.read_bytes_per_second;
  };
  EXPECT_NEAR(rate({.file = file}), 4e6, 1);
  EXPECT_NEAR(rate({.file = file, .sharing_ranks = 2}), 2e6, 1);
  EXPECT_NEAR(rate({.file = file, .paths = {"/x/b"}, .sharing_ranks = 2}), 0.5e6, 1);
}

TEST(LimitMeter, EvaluationsChangeNoRate) {
  for (const bool evaluates : {false, true}) {
    SCOPED_TRACE(evaluates);
    const Measured run = measured(evaluates);
    EXPECT_GT(run.rates.read_bytes_per_second, 0.5 * kDriveRate);
    EXPECT_LT(run.rates.read_bytes_per_second, 1.15 * kDriveRate);
    EXPECT_GT(run.rates.up_bytes_per_second, 0);
    EXPECT_LT(run.rates.up_bytes_per_second, 1e12);
    EXPECT_GT(run.rates.adam_parameters_per_second, 0);
    EXPECT_GT(run.busy_before_ns, 0);
  }
}

}  // namespace
}  // namespace sluice::test
