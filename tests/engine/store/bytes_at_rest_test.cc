// The bytes that each kind of moments takes and moves for a model in bf16: at rest, in files and in
// memory, and in a step. The meters agree with the plan and with the format.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <optional>
#include <string>

#include <fmt/format.h>

#include <sluice/plan.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/planner/phase_memory.h"
#include "engine/planner/run_plan.h"
#include "io/direct_file.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kDeviceBytes = 4_MiB;
constexpr double kTolerance = 0.05;

// Six units of a matrix and a bias, whose lengths fit neither blocks nor pages.
ModelSpec matrices() {
  ModelSpec model;
  for (std::uint32_t i = 0; i < 6; ++i) {
    const std::string name = fmt::format("h.{}", i);
    model.units.push_back(
        {.name = name,
         .tensors = {{.name = name + ".w", .shape = {300, 641}},
                     {.name = name + ".b", .shape = {641}, .weight_decay = WeightDecay::kNone}}});
  }
  return validated(model);
}

// With 2 bytes for the parameter and 2 for the rest of its master.
double bytes_of(OptimizerState state) {
  switch (state) {
    case OptimizerState::kFp32: return 12;
    case OptimizerState::kBf16: return 8;
    case OptimizerState::k8bit: break;
  }
  return 6 + 2 * 4 / 256.0;  // with a scale for each 256 codes
}

class BytesAtRest : public testing::TestWithParam<OptimizerState> {
 protected:
  Config config(TierChoice home) const {
    Config config = toy_config(directory_.path());
    config.placement = {home, home, TierChoice::kHost};
    config.storage.block_elements = 64 * 1024;
    config.memory.device_bytes = kDeviceBytes;
    config.precision = {.parameters = DType::kBf16, .gradients = DType::kBf16};
    config.optimizer.state = GetParam();
    config.optimizer.overlap = OverlapPolicy::kSerial;
    config.optimizer.lanes = 2;
    return config;
  }
  // Expects the figure to be as planned and, if it is given, as known for one parameter. Notes the
  // figure down.
  void expect(const char* what, std::uint64_t metered_bytes, std::uint64_t planned_bytes,
              std::optional<double> known = {}) {
    const auto count = static_cast<double>(model_.element_count());
    const double metered = static_cast<double>(metered_bytes) / count;
    const double planned = static_cast<double>(planned_bytes) / count;
    EXPECT_NEAR(metered / planned, 1, kTolerance) << what;
    if (known) {
      EXPECT_NEAR(metered / *known, 1, kTolerance) << what;
    }
    RecordProperty(what, fmt::format("{:.3f} metered, {:.3f} planned", metered, planned));
  }

  const TempDirectory directory_;
  const ModelSpec model_ = matrices();
};

std::uint64_t bytes_on(Tier tier, const std::vector<Pool>& pools) {
  std::uint64_t bytes = 0;
  for (const Pool& pool : pools)
    if (pool.tier == tier) bytes += pool.size_bytes;
  return bytes;
}

// Fetches read each parameter in forward, and again in backward: those of the first units, since
// the last ones are still in the window.
double fetched_bytes(const Engine& engine) {
  const Layout& layout = layout_of(engine);
  const std::uint64_t places =
      placement_of(engine).window_bytes / layout.unit_parameter_bytes(UnitId{0});
  const auto units = static_cast<double>(layout.units().size());
  return 2 * (2 - static_cast<double>(places) / units);
}

TEST_P(BytesAtRest, FilesAndTraffic) {
  const Config of_run = config(TierChoice::kNvme);
  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  Engine engine(of_run, model_, *device);
  std::uint64_t file_bytes = 0;
  for (const DirectFile& file : storage_files_of(engine)) {
    struct stat found {};
    ASSERT_EQ(::fstat(file.descriptor(), &found), 0);
    EXPECT_GE(found.st_blocks * 512, found.st_size);  // the space is there
    file_bytes += static_cast<std::uint64_t>(found.st_size);
  }
  const ToyResult result = run_toy(engine, model_, *device, of_run, {.steps = 2});
  const Plan planned = plan(of_run, model_, {.device_bytes = kDeviceBytes});
  const double rest = bytes_of(GetParam());
  expect("file bytes at rest", file_bytes, planned.nvme_bytes, rest);
  if (GetParam() == OptimizerState::k8bit) {
    EXPECT_LE(static_cast<double>(file_bytes), 6.2 * static_cast<double>(model_.element_count()));
  }
  const StepReport& report = result.reports.back();
  expect("bytes written in a step", report.nvme_write_bytes, planned.traffic.nvme_write_bytes,
         rest);
  expect("bytes read in a step", report.nvme_read_bytes, planned.traffic.nvme_read_bytes,
         rest + fetched_bytes(engine));
}

// All state is at home in host memory.
TEST_P(BytesAtRest, ResidentMemory) {
  const Config of_run = config(TierChoice::kHost);
  const auto device = make_host_device({.memory_bytes = kDeviceBytes, .has_own_memory = true});
  Engine engine(of_run, model_, *device);
  const ToyResult result = run_toy(engine, model_, *device, of_run, {.steps = 2});
  PhaseMarks metered;
  for (const StepReport& report : result.reports) raise_marks(metered, report.buffers);
  const PhaseMarks predicted = predicted_marks({.model = model_,
                                                .layout = layout_of(engine),
                                                .placement = placement_of(engine),
                                                .policy = OverlapPolicy::kSerial});
  PoolMarks most, expected;
  for (const PoolMarks& marks : metered) raise_marks(most, marks);
  for (const PoolMarks& marks : predicted) raise_marks(expected, marks);
  const auto state = [](const PoolMarks& marks) {
    return marks.most(MemoryPool::kHostParameters) + marks.most(MemoryPool::kHostRecords);
  };
  expect("resident state", state(most), state(expected), bytes_of(GetParam()));
  if (GetParam() == OptimizerState::k8bit) {
    EXPECT_LE(static_cast<double>(state(most)), 6.2 * static_cast<double>(model_.element_count()));
  }
  expect("peak of host memory", most.most(Tier::kHost), expected.most(Tier::kHost));
  expect("peak of device memory", most.most(Tier::kDevice), expected.most(Tier::kDevice));
  const Plan planned =
      plan(of_run, model_, {.device_is_host = false, .device_bytes = kDeviceBytes});
  EXPECT_EQ(planned.host_bytes, bytes_on(Tier::kHost, planned.pools));
  EXPECT_EQ(placement_of(engine).host_bytes(), planned.host_bytes);
}

INSTANTIATE_TEST_SUITE_P(Moments, BytesAtRest,
                         testing::Values(OptimizerState::kFp32, OptimizerState::kBf16,
                                         OptimizerState::k8bit),
                         [](const auto& value) {
                           return value.param == OptimizerState::k8bit
                                      ? std::string("of8Bits")
                                      : std::string(name_of(value.param));
                         });

}  // namespace
}  // namespace sluice::test
