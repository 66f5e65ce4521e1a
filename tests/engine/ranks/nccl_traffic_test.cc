// The bytes that step reports give for the ranks' collectives, beside those that the stand-in for
// NCCL sees pass inside nodes and between them. Ranks are threads of one process. Runs without a
// GPU.
#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/engine.h>
#include <sluice/units.h>
#include "gpu/ranks/nccl_collectives.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/gpu/ranks/fake_nccl.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kRanks = 4;
constexpr std::uint32_t kNodeRanks = 2;
constexpr std::uint32_t kNodes = kRanks / kNodeRanks;

// Units without padding, whose bytes would travel along.
ModelSpec whole_units() {
  ModelSpec model;
  for (std::uint32_t unit = 0; unit < 3; ++unit) {
    const std::string name = fmt::format("h.{}", unit);
    model.units.push_back({name, {{.name = name + ".fc", .shape = {64 * (unit + 1), 128}}}});
    model.forward_order.push_back(UnitId{unit});
    model.backward_order.insert(model.backward_order.begin(), UnitId{unit});
  }
  return validated(model);
}

Config config_of(std::uint32_t stage, DType type, bool has_nodes, const TempDirectory& folder) {
  Config config = sharded_config(folder.path(), stage, /*uses_nvme=*/false, type);
  config.memory.device_bytes = 4_MiB;
  config.optimizer.overlap = OverlapPolicy::kSerial;  // every gather is in the report of its step
  if (has_nodes) {
    config.sharding.reduction = RankReduction::kNodes;
    config.sharding.node_ranks = kNodeRanks;
  }
  return config;
}

// Trains three steps, and calls `begin_count` on each rank after the first. Returns the sum of the
// later reports.
RankTraffic train(const Config& config, Device& device, Collectives& collectives,
                  const std::function<void()>& begin_count) {
  const ModelSpec model = whole_units();
  Engine engine(config, model, device, &collectives);
  engine.initialize(toy_values());
  const Stream stream(device, "compute");
  RankTraffic sum;
  for (int number = 0; number < 3; ++number) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      device.fill_zero(lease.gradient(0),
                       model.units[index_of(unit)].tensors[0].element_count() *
                           size_of(config.precision.gradients),
                       stream.id());
    }
    const RankTraffic traffic = step.finish().rank_traffic;
    if (number == 0) {
      // A unit that can be used has been gathered behind its update.
      Inference inference = engine.begin_inference();
      for (const UnitId unit : model.forward_order) (void)inference.acquire(unit, stream);
      begin_count();
      continue;
    }
    sum.reduced_bytes += traffic.reduced_bytes;
    sum.gathered_bytes += traffic.gathered_bytes;
    sum.crossed_bytes += traffic.crossed_bytes;
  }
  return sum;
}

// The sum over the ranks, as the reports give it and as the stand-in has counted it.
struct Bytes {
  RankTraffic reported;
  fake_nccl_counts seen;
};

Bytes bytes_of(const Config& config) {
  const NcclId id = make_nccl_id(FAKE_NCCL);
  Bytes all;
  std::mutex mutex;
  std::barrier together(kRanks, []() noexcept {
    (void)take_fake_nccl_counts(FAKE_NCCL);
    count_fake_nccl_nodes(FAKE_NCCL, kNodeRanks);
  });
  const auto run = [&](std::uint32_t rank) {
    const auto device = make_cuda_device({.ordinal = static_cast<int>(rank) + 1,
                                          .memory_bytes = 192_MiB,
                                          .memory_source = nccl_memory_source(FAKE_NCCL)});
    const auto collectives =
        make_nccl_collectives(*device, {.timeout_s = 60, .library = FAKE_NCCL}, id, rank, kRanks);
    const RankTraffic traffic =
        train(config, *device, *collectives, [&] { together.arrive_and_wait(); });
    const std::scoped_lock lock(mutex);
    all.reported.reduced_bytes += traffic.reduced_bytes;
    all.reported.gathered_bytes += traffic.gathered_bytes;
    all.reported.crossed_bytes += traffic.crossed_bytes;
  };
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  all.seen = take_fake_nccl_counts(FAKE_NCCL);
  count_fake_nccl_nodes(FAKE_NCCL, 0);
  return all;
}

// In one level a rank gets all other ranks' parts itself. In two levels it gets the parts of its
// peers in the other nodes, of fp32 sums and of parameters, and all others inside its node.
TEST(NcclTraffic, IsThatOfTheReports) {
  for (const DType type : {DType::kFp32, DType::kBf16}) {
    for (std::uint32_t stage = 0; stage <= 3; ++stage) {
      if (type == DType::kFp32 && stage != 2) continue;  // that the type matters to sums alone
      SCOPED_TRACE(fmt::format("stage {}, {}", stage, name_of(type)));
      const TempDirectory folder;
      const Bytes flat = bytes_of(config_of(stage, type, /*has_nodes=*/false, folder));
      const Bytes nodes = bytes_of(config_of(stage, type, /*has_nodes=*/true, folder));
      const std::uint64_t moved = flat.reported.reduced_bytes + flat.reported.gathered_bytes;
      ASSERT_GT(moved, 0u);
      EXPECT_EQ(nodes.reported.reduced_bytes + nodes.reported.gathered_bytes, moved);
      EXPECT_EQ(flat.reported.crossed_bytes, 0u);
      EXPECT_EQ(flat.seen.across_bytes, moved * (kRanks - kNodeRanks) / kRanks);
      EXPECT_EQ(flat.seen.inside_bytes, moved * (kNodeRanks - 1) / kRanks);
      EXPECT_EQ(nodes.seen.across_bytes, nodes.reported.crossed_bytes * (kNodes - 1) / kNodes);
      EXPECT_EQ(nodes.seen.inside_bytes, moved * (kNodeRanks - 1) / kNodeRanks);
      // Sums cross in fp32, whatever the type of the gradients.
      EXPECT_EQ(nodes.reported.crossed_bytes,
                (flat.reported.reduced_bytes * sizeof(float) / size_of(type) +
                 flat.reported.gathered_bytes) /
                    kNodeRanks);
      // A row of docs/results/gpu.md.
      fmt::print("figure: | {} | {} | {} | {} | {} | {} |\n", name_of(type), stage,
                 flat.seen.across_bytes, nodes.seen.across_bytes, flat.seen.inside_bytes,
                 nodes.seen.inside_bytes);
    }
  }
}

}  // namespace
}  // namespace sluice::test
