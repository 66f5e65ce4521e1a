// How a whole training step drives the link to a GPU: the calls of the CUDA runtime, counted over
// the stand-in, with the gradients that come down and the state that passes through lanes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/engine.h>
#include <sluice/units.h>
#include "engine/plan/layout.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

using Kind = FakeCudaCall::Kind;

constexpr std::uint32_t kUnits = 6;
constexpr std::uint64_t kBlockElements = 16 << 10;
constexpr std::uint64_t kUnitBlocks = 4;
constexpr std::uint64_t kBlockBytes = kBlockElements * 2;  // bf16
constexpr std::uint64_t kUnitBytes = kUnitBlocks * kBlockBytes;

ModelSpec even_model() {
  ModelSpec model;
  for (std::uint32_t unit = 0; unit < kUnits; ++unit) {
    model.units.push_back({.name = "unit" + std::to_string(unit),
                           .tensors = {{.name = "weight" + std::to_string(unit),
                                        .shape = {kUnitBlocks, kBlockElements}}}});
    model.forward_order.push_back(UnitId{unit});
    model.backward_order.insert(model.backward_order.begin(), UnitId{unit});
  }
  return validated(model);
}

struct StepCase {
  TierChoice parameters{};
  TierChoice optimizer{};
  TierChoice gradients = TierChoice::kHost;
  std::uint32_t micro_batches = 1;
};

// The calls of a training step with everything behind it, and what may be counted in them.
class CallsOfStep {
 public:
  explicit CallsOfStep(const StepCase& wanted) {
    const TempDirectory folder;
    const ModelSpec model = even_model();
    const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 96_MiB});
    Config config;
    config.precision = {.parameters = DType::kBf16, .gradients = DType::kBf16};
    config.placement = {.parameters = wanted.parameters,
                        .optimizer = wanted.optimizer,
                        .gradients = wanted.gradients};
    config.memory = {.device_bytes = 40_MiB, .host_bytes = 64_MiB};
    config.storage.paths = {folder.path()};
    config.storage.block_elements = kBlockElements;
    config.threads = 1;
    Engine engine(config, model, *device);
    engine.initialize([](const TensorPlace&, std::uint64_t first, std::span<float> values) {
      for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>((first + i) % 251) * 0x1p-9f;
    });
    const Stream stream(*device, "compute");
    run_step(engine, model, stream, wanted.micro_batches);  // the pools are as in any later step
    log_fake_cuda_calls(true);
    run_step(engine, model, stream, wanted.micro_batches);
    calls_ = take_fake_cuda_calls();
  }

  std::size_t count(Kind kind) const {
    return static_cast<std::size_t>(std::ranges::count_if(
        calls_, [kind](const auto& call) { return call.kind == kind && !call.is_continued; }));
  }
  std::uint64_t bytes(Kind kind) const {
    std::uint64_t sum = 0;
    for (const FakeCudaCall& call : calls_) sum += call.kind == kind ? call.size_bytes : 0;
    return sum;
  }
  // Copies of these kinds that follow one another on a stream and whose ends meet, so that they
  // could have been one.
  std::vector<std::string> splits(const std::set<Kind>& kinds) const {
    std::map<std::uint64_t, FakeCudaCall> last;  // by stream
    std::vector<std::string> found;
    for (const FakeCudaCall& call : calls_) {
      if (const auto before = last.find(call.stream);
          before != last.end() && kinds.contains(call.kind)) {
        const FakeCudaCall& first = before->second;
        if (first.kind == call.kind && first.target + first.size_bytes == call.target &&
            first.source + first.size_bytes == call.source)
          found.push_back(std::to_string(first.size_bytes) + " and " +
                          std::to_string(call.size_bytes));
      }
      last[call.stream] = call;
    }
    return found;
  }
  std::string list() const {
    std::string text;
    for (const FakeCudaCall& call : calls_)
      text += std::to_string(static_cast<int>(call.kind)) + " " + std::to_string(call.stream) +
              (call.is_continued ? " + " : " ") + std::to_string(call.size_bytes) + "\n";
    return text;
  }

 private:
  static void run_step(Engine& engine, const ModelSpec& model, const Stream& stream,
                       std::uint32_t micro_batches) {
    Step step = engine.begin_step({.learning_rate = 1e-3, .micro_batches = micro_batches});
    for (std::uint32_t i = 0; i < micro_batches; ++i) {
      for (const UnitId unit : model.forward_order)
        (void)step.acquire(unit, Pass::kForward, stream);
      for (const UnitId unit : model.backward_order)
        (void)step.acquire(unit, Pass::kBackward, stream);
    }
    (void)step.finish();
    engine.drain();
  }

  std::vector<FakeCudaCall> calls_;
};

constexpr std::uint64_t kBlocks = kUnits * kUnitBlocks;
constexpr std::uint64_t kModelBytes = kUnits * kUnitBytes;

// Copies of these kinds wait for nothing that comes block by block.
const std::set<Kind> kBoth{Kind::kCopyUp, Kind::kCopyDown};
const std::set<Kind> kDown{Kind::kCopyDown};

// No stream waits for the host, and no run of blocks is cut. Prints a row of docs/results/gpu.md.
void expect_no_host_function_and_no_split(const char* what, const CallsOfStep& calls,
                                          const std::set<Kind>& kinds = kBoth) {
  EXPECT_EQ(calls.count(Kind::kCallback), 0u) << what;
  EXPECT_EQ(calls.splits(kinds), std::vector<std::string>{}) << what << "\n" << calls.list();
  fmt::print("figure: | {} | {} | {} | {} | {} | {} |\n", what,
             calls.bytes(Kind::kCopyUp) / kBlockBytes, calls.count(Kind::kCopyUp),
             calls.bytes(Kind::kCopyDown) / kBlockBytes, calls.count(Kind::kCopyDown),
             calls.count(Kind::kCallback));
}

TEST(CudaStepCopies, StateInHostMemoryMovesByUnits) {
  const CallsOfStep calls({.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost});
  expect_no_host_function_and_no_split("state in host memory", calls);
  EXPECT_EQ(calls.bytes(Kind::kCopyUp), calls.count(Kind::kCopyUp) * kUnitBytes);
  EXPECT_LE(calls.count(Kind::kCopyUp), 2 * kUnits) << "forward and backward";
  EXPECT_EQ(calls.bytes(Kind::kCopyDown), kModelBytes);
  EXPECT_EQ(calls.count(Kind::kCopyDown), kUnits) << "gradients, one copy for each unit";
}

TEST(CudaStepCopies, BlocksFromTheDriveGoUpAsTheyCome) {
  const CallsOfStep calls({.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme});
  expect_no_host_function_and_no_split("state on a drive", calls, kDown);
  EXPECT_LE(calls.count(Kind::kCopyUp), 2 * kBlocks);
  EXPECT_EQ(calls.count(Kind::kCopyDown), kUnits);
}

// The parameters go down into lanes and up again.
TEST(CudaStepCopies, StateOfLanesJoins) {
  const CallsOfStep calls({.parameters = TierChoice::kDevice, .optimizer = TierChoice::kHost});
  expect_no_host_function_and_no_split("parameters on the GPU, moments in host memory", calls);
  EXPECT_EQ(calls.bytes(Kind::kCopyUp), kModelBytes);
  EXPECT_LT(calls.count(Kind::kCopyUp), kBlocks);
  EXPECT_EQ(calls.bytes(Kind::kCopyDown), 2 * kModelBytes);
  EXPECT_LT(calls.count(Kind::kCopyDown), kUnits + kBlocks);
}

TEST(CudaStepCopies, GradientsThatWaitOnTheGpuComeToLanesTogether) {
  const CallsOfStep calls({.parameters = TierChoice::kHost,
                           .optimizer = TierChoice::kHost,
                           .gradients = TierChoice::kDevice});
  expect_no_host_function_and_no_split("gradients on the GPU, state in host memory", calls);
  // With the sums of squares of the norm, one for 256 elements.
  EXPECT_EQ(calls.bytes(Kind::kCopyDown),
            kModelBytes + kBlocks * kBlockElements / 256 * sizeof(double));
  EXPECT_LT(calls.count(Kind::kCopyDown), kUnits + kBlocks);
}

// The first gradient of a unit is one copy; pieces of later ones come through staging slots.
TEST(CudaStepCopies, PiecesOfLaterGradientsJoin) {
  const CallsOfStep calls(
      {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost, .micro_batches = 3});
  expect_no_host_function_and_no_split("three micro-batches", calls);
  EXPECT_EQ(calls.bytes(Kind::kCopyDown), 3 * kModelBytes);
  EXPECT_LT(calls.count(Kind::kCopyDown), kUnits + 2 * kBlocks);
}

TEST(CudaStepCopies, GradientsOnTheirWayToADriveJoin) {
  const CallsOfStep calls({.parameters = TierChoice::kNvme,
                           .optimizer = TierChoice::kNvme,
                           .gradients = TierChoice::kNvme,
                           .micro_batches = 2});
  expect_no_host_function_and_no_split("gradients on a drive, two micro-batches", calls, kDown);
  EXPECT_EQ(calls.bytes(Kind::kCopyDown), 2 * kModelBytes);
  EXPECT_LT(calls.count(Kind::kCopyDown), 2 * kBlocks);
}

// The same where the driver takes no copies together: each run is a call.
TEST(CudaStepCopies, AnOlderDriverGetsTheSameRuns) {
  set_fake_cuda_batches(FakeCudaBatches::kUnknown);
  const CallsOfStep calls({.parameters = TierChoice::kDevice, .optimizer = TierChoice::kHost});
  set_fake_cuda_batches(FakeCudaBatches::kTaken);
  expect_no_host_function_and_no_split("the same, a driver before CUDA 12.8", calls);
  EXPECT_EQ(calls.bytes(Kind::kCopyUp), kModelBytes);
  EXPECT_EQ(calls.bytes(Kind::kCopyDown), 2 * kModelBytes);
}

}  // namespace
}  // namespace sluice::test
