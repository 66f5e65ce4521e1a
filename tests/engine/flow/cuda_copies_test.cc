// How the engine drives the link to a GPU: which calls of the CUDA runtime it makes, counted over
// the stand-in, and the share of the link that they leave to the bytes, by a model of costs.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/engine.h>
#include <sluice/units.h>
#include "engine/plan/layout.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/link_cost_model.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

using Kind = FakeCudaCall::Kind;

constexpr std::uint32_t kUnits = 6;
constexpr std::uint64_t kBlockElements = std::uint64_t{1} << 20;  // 2 MiB of bf16
constexpr std::uint64_t kUnitBlocks = 4;

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

Config config_of(const std::string& folder, TierChoice parameters) {
  Config config;
  config.precision.parameters = DType::kBf16;
  config.precision.gradients = DType::kBf16;
  config.placement = {.parameters = parameters, .optimizer = TierChoice::kHost};
  config.memory.device_bytes = 40_MiB;
  config.memory.host_bytes = 600_MiB;
  config.storage.paths = {folder};
  config.storage.block_elements = kBlockElements;
  config.threads = 1;
  return config;
}

// The calls of an inference, in which no update is under way. The window holds half of the units.
std::vector<FakeCudaCall> calls_of_inference(TierChoice parameters) {
  const TempDirectory folder;
  const ModelSpec model = even_model();
  const auto device = make_cuda_device({.ordinal = 1, .memory_bytes = 96_MiB});
  Engine engine(config_of(folder.path(), parameters), model, *device);
  engine.initialize([](const TensorPlace&, std::uint64_t first, std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>((first + i) % 251) * 0x1p-9f;
  });
  const Stream stream(*device, "compute");
  log_fake_cuda_calls(true);
  {
    Inference inference = engine.begin_inference();
    for (const UnitId unit : model.forward_order) (void)inference.acquire(unit, stream);
  }
  return take_fake_cuda_calls();
}

std::vector<FakeCudaCall> of_kind(const std::vector<FakeCudaCall>& calls, Kind kind) {
  std::vector<FakeCudaCall> found;
  std::ranges::copy_if(calls, std::back_inserter(found),
                       [&](const FakeCudaCall& call) { return call.kind == kind; });
  return found;
}

LinkCosts costs() {
  return read_link_costs(LINK_COSTS);
}

// Prints a row of docs/results/gpu.md.
void tell(const char* what, const std::vector<FakeCudaCall>& calls, double least, double most) {
  std::size_t copy_calls = 0;
  std::uint64_t bytes = 0;
  for (const FakeCudaCall& call : of_kind(calls, Kind::kCopyUp)) {
    copy_calls += call.is_continued ? 0 : 1;
    bytes += call.size_bytes;
  }
  fmt::print("figure: | {} | {} | {} | {} | {} | {:.1f} to {:.1f} |\n", what, bytes / 2_MiB,
             copy_calls, of_kind(calls, Kind::kCallback).size(),
             of_kind(calls, Kind::kRecord).size(), 100 * least, 100 * most);
}

// A block of 2 MiB and a callback behind it, again and again: 27 to 65 % had been predicted.
TEST(CudaCopies, ACallbackBehindEveryBlockLeavesAThirdToTwoThirdsOfTheLink) {
  std::vector<FakeCudaCall> calls;
  for (int block = 0; block < 64; ++block) {
    calls.push_back({.kind = Kind::kCopyUp, .stream = 1, .size_bytes = 2_MiB});
    calls.push_back({.kind = Kind::kCallback, .stream = 1});
  }
  const double most = share_of_link(calls, costs(), costs().callback_least_ns);
  const double least = share_of_link(calls, costs(), costs().callback_most_ns);
  EXPECT_NEAR(most, 0.65, 0.02);
  EXPECT_NEAR(least, 0.27, 0.02);
  tell("a callback behind each block", calls, least, most);
}

// A stream of its own that waits for each report would stop others in the same hardware queue.
TEST(CudaCopies, TheModelKnowsThatAWaitBlocksItsHardwareQueue) {
  std::vector<FakeCudaCall> calls;
  calls.push_back({.kind = Kind::kCopyDown, .stream = 1, .size_bytes = 64_MiB});
  calls.push_back({.kind = Kind::kRecord, .stream = 1, .event = 7});
  for (std::uint64_t stream = 2; stream <= 8; ++stream)
    calls.push_back({.kind = Kind::kKernel, .stream = stream});
  calls.push_back({.kind = Kind::kCopyUp, .stream = 2, .size_bytes = 2_MiB});
  calls.push_back({.kind = Kind::kWait, .stream = 9, .event = 7});
  const auto with_stream = [&](std::uint64_t stream) {
    std::vector<FakeCudaCall> all = calls;
    // The ninth stream shares the queue of the first; the tenth that of the second.
    all.push_back({.kind = Kind::kWait, .stream = 10, .event = 7});
    all.push_back({.kind = Kind::kCopyUp, .stream = stream, .size_bytes = 2_MiB});
    return share_of_link(all, costs(), 0);
  };
  EXPECT_GT(with_stream(3), 0.9);
  EXPECT_LT(with_stream(2), 0.1);
}

TEST(CudaCopies, AUnitInHostMemoryIsOneCopyAndNoCallback) {
  const std::vector<FakeCudaCall> calls = calls_of_inference(TierChoice::kHost);
  const std::vector<FakeCudaCall> copies = of_kind(calls, Kind::kCopyUp);
  ASSERT_EQ(copies.size(), kUnits) << "one for each contiguous run of blocks";
  for (const FakeCudaCall& copy : copies)
    EXPECT_EQ(copy.size_bytes, kUnitBlocks * kBlockElements * 2);
  EXPECT_EQ(of_kind(calls, Kind::kCallback).size(), 0u);
  // The gate of a place that was in use, the end of the copy, and the unit's readiness.
  std::size_t records = 0;
  for (const FakeCudaCall& call : of_kind(calls, Kind::kRecord))
    if (call.stream == copies.front().stream) ++records;
  EXPECT_LE(records, 3 * kUnits);
  const double most = share_of_link(calls, costs(), costs().callback_least_ns);
  const double least = share_of_link(calls, costs(), costs().callback_most_ns);
  EXPECT_GE(least, 0.95);
  tell("units in host memory", calls, least, most);
}

// Blocks come from the drive one by one, so they are copied as they come.
TEST(CudaCopies, BlocksFromTheDriveTakeNoCallbackEither) {
  const std::vector<FakeCudaCall> calls = calls_of_inference(TierChoice::kNvme);
  const std::vector<FakeCudaCall> copies = of_kind(calls, Kind::kCopyUp);
  std::uint64_t bytes = 0;
  for (const FakeCudaCall& copy : copies) bytes += copy.size_bytes;
  EXPECT_EQ(bytes, kUnits * kUnitBlocks * kBlockElements * 2);
  EXPECT_LE(copies.size(), kUnits * kUnitBlocks);
  EXPECT_EQ(of_kind(calls, Kind::kCallback).size(), 0u);
  // How many blocks join depends on when they come. A copy call costs the gap before it and its
  // record, and a unit three more events. With a call for each block, 0.92 of the link is left.
  const auto copy_calls =
      static_cast<double>(std::ranges::count(copies, false, &FakeCudaCall::is_continued));
  const double bytes_ns = static_cast<double>(bytes) * 1e9 / costs().link_bytes_per_second;
  const double between_ns =
      copy_calls * (costs().copy_gap_ns + costs().event_ns) + 3 * kUnits * costs().event_ns;
  const double most = share_of_link(calls, costs(), costs().callback_least_ns);
  const double least = share_of_link(calls, costs(), costs().callback_most_ns);
  EXPECT_GE(least, bytes_ns / (bytes_ns + between_ns)) << copy_calls << " copy calls";
  tell("units on a drive", calls, least, most);
}

}  // namespace
}  // namespace sluice::test
