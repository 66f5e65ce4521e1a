// How a whole training step drives the link to a GPU: the calls of the CUDA runtime, counted over
// the stand-in, with the gradients that come down and the state that passes through lanes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

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

bool is_copy(const FakeCudaCall& call) {
  return call.kind == Kind::kCopyUp || call.kind == Kind::kCopyDown;
}

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
  // Copies of more than 4 KiB that follow one another on a stream and whose ends meet, so that they
  // could have been one.
  std::vector<std::string> splits() const {
    std::map<std::uint64_t, FakeCudaCall> last;  // by stream
    std::vector<std::string> found;
    for (const FakeCudaCall& call : calls_) {
      if (const auto before = last.find(call.stream); before != last.end() && is_copy(call)) {
        const FakeCudaCall& first = before->second;
        if (is_copy(first) && first.target + first.size_bytes == call.target &&
            first.source + first.size_bytes == call.source)
          found.push_back(std::to_string(first.size_bytes) + " and " +
                          std::to_string(call.size_bytes));
      }
      last[call.stream] = call;
    }
    return found;
  }
  // The events that are recorded on streams that copy in this direction.
  std::size_t records_of(Kind kind) const {
    std::map<std::uint64_t, bool> copies;
    for (const FakeCudaCall& call : calls_)
      if (call.kind == kind) copies[call.stream] = true;
    return static_cast<std::size_t>(std::ranges::count_if(calls_, [&](const auto& call) {
      return call.kind == Kind::kRecord && copies.contains(call.stream);
    }));
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

TEST(CudaStepCopies, Explore) {
  const std::vector<StepCase> cases{
      {TierChoice::kHost, TierChoice::kHost},
      {TierChoice::kNvme, TierChoice::kNvme},
      {TierChoice::kDevice, TierChoice::kHost},
      {TierChoice::kDevice, TierChoice::kNvme, TierChoice::kDevice},
      {TierChoice::kHost, TierChoice::kHost, TierChoice::kDevice},
      {TierChoice::kHost, TierChoice::kHost, TierChoice::kHost, 3},
      {TierChoice::kNvme, TierChoice::kNvme, TierChoice::kNvme, 2},
  };
  for (const StepCase& one : cases) {
    const CallsOfStep calls(one);
    std::cout << "up " << calls.count(Kind::kCopyUp) << " of "
              << calls.bytes(Kind::kCopyUp) / kBlockBytes << " down "
              << calls.count(Kind::kCopyDown) << " of "
              << calls.bytes(Kind::kCopyDown) / kBlockBytes << " callbacks "
              << calls.count(Kind::kCallback) << " splits " << calls.splits().size() << " records "
              << calls.records_of(Kind::kCopyUp) << " " << calls.records_of(Kind::kCopyDown)
              << "\n";
    for (const auto& split : calls.splits()) std::cout << "  " << split << "\n";
  }
}

}  // namespace
}  // namespace sluice::test
