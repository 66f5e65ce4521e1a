// The engine over a CUDA device and NCCL, both stand-ins, against the engine over host devices and
// collectives between threads: the same bits in every stage. Gradients are copied to the device,
// as computation would leave them there. Runs without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "cpu_optim/rank_sum.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "gpu/ranks/local_collectives.h"
#include "gpu/ranks/nccl_collectives.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/gpu/cuda/fake_cuda_runtime.h"
#include "tests/gpu/ranks/fake_nccl.h"
#include "tests/support/temp_directory.h"
#include "tests/support/typed_elements.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kRanks = 4;
constexpr std::uint64_t kSteps = 3;

// Uneven enough that the order of ranks shows.
float gradient_of(std::uint32_t rank, std::uint64_t step, std::uint32_t unit, std::uint64_t i) {
  const std::uint64_t key =
      (i * 2654435761u + rank * 40503u + unit * 977u + step * 131u) ^ (i >> 5);
  return (static_cast<float>(key % 2001) - 1000.0f) * (key % 5 == 0 ? 0x1p-4f : 0x1p-20f);
}

// Host memory for one unit's gradient, page-locked as a copy wants it.
class PinnedGradient {
 public:
  PinnedGradient(Device& device, std::uint64_t size_bytes)
      : device_(device), memory_(size_bytes, "a gradient") {
    device_.register_host_memory(memory_.span());
  }
  ~PinnedGradient() { device_.unregister_host_memory(memory_.span()); }
  PinnedGradient(const PinnedGradient&) = delete;
  PinnedGradient& operator=(const PinnedGradient&) = delete;
  std::byte* data() { return memory_.data(); }

 private:
  Device& device_;
  AlignedBuffer memory_;
};

// Rank 0 is one backward use ahead of the others, who come to their next one when nothing of the
// last is under way any more: taking any free gradient slot, they would take another than rank 0.
class Lag {
 public:
  explicit Lag(std::uint32_t rank, std::atomic<std::uint64_t>& acquired)
      : rank_(rank), acquired_(acquired) {}

  void acquire() {
    ++own_;
    if (rank_ == 0) ++acquired_;
  }
  // Requires: rank 0 acquires once more before it finishes the step.
  void before_release() const {
    while (rank_ != 0 && acquired_ <= own_) std::this_thread::sleep_for(kMoment);
  }
  void after_release() const {
    if (rank_ != 0) std::this_thread::sleep_for(10 * kMoment);
  }

 private:
  static constexpr std::chrono::milliseconds kMoment{1};

  const std::uint32_t rank_;
  std::atomic<std::uint64_t>& acquired_;  // by rank 0
  std::uint64_t own_ = 0;
};

StateBytes train(const Config& config, Device& device, Collectives* collectives,
                 Lag* lag = nullptr) {
  const ModelSpec model = validated(toy_model());
  Engine engine(config, model, device, collectives);
  engine.initialize(toy_values());
  const Stream stream(device, "compute");
  const DType type = config.precision.gradients;
  for (std::uint64_t number = 0; number < kSteps; ++number) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      if (lag != nullptr) lag->after_release();
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      if (lag != nullptr) lag->acquire();
      const auto tensors = layout_of(engine).tensors_of(unit);
      for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
        const std::uint64_t count = tensors[tensor].element_count;
        PinnedGradient gradient(device, count * size_of(type));
        for (std::uint64_t i = 0; i < count; ++i)
          save(type, gradient.data(), i,
               gradient_of(engine.rank(), number, index_of(unit), i + tensor));
        device.copy(lease.gradient(tensor), gradient.data(), count * size_of(type), stream.id());
        device.synchronize(stream.id());
      }
      if (lag != nullptr && unit != model.backward_order.back()) lag->before_release();
    }
    (void)step.finish();
  }
  return read_state(engine);
}

template <class Body>
std::vector<StateBytes> on_threads(const Body& body) {
  std::vector<StateBytes> states(kRanks);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] { states[rank] = body(rank); });
  for (std::thread& thread : threads) thread.join();
  return states;
}

std::vector<StateBytes> on_hosts(const Config& config) {
  LocalWorld world(kRanks, {.timeout_s = 60, .sum = sum_in_order});
  return on_threads([&](std::uint32_t rank) {
    const auto device = make_host_device({.memory_bytes = 32_MiB});
    const auto collectives = world.join(rank, *device);
    return train(config, *device, collectives.get());
  });
}

std::vector<StateBytes> on_gpus(const Config& config, bool lags = false) {
  const NcclId id = make_nccl_id(FAKE_NCCL);
  const NcclReduction reduction = config.sharding.reduction == RankReduction::kNccl
                                      ? NcclReduction::kPlain
                                      : NcclReduction::kExact;
  std::atomic<std::uint64_t> acquired = 0;
  (void)take_fake_cuda_contexts();
  unload_fake_cuda_kernels();
  (void)take_fake_cuda_late_loads();
  log_fake_cuda_calls(true);
  std::vector<StateBytes> states = on_threads([&](std::uint32_t rank) {
    // Not the GPU that threads have without choosing.
    const auto device = make_cuda_device({.ordinal = static_cast<int>(rank) + 1,
                                          .memory_bytes = 192_MiB,
                                          .memory_source = nccl_memory_source(FAKE_NCCL)});
    const auto collectives = make_nccl_collectives(
        *device, {.timeout_s = 60, .reduction = reduction, .library = FAKE_NCCL}, id, rank, kRanks);
    Lag lag(rank, acquired);
    try {
      return train(config, *device, collectives.get(), lags ? &lag : nullptr);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      acquired = kSteps << 32;  // no rank waits for this one
      return StateBytes();
    }
  });
  EXPECT_EQ(take_fake_cuda_contexts(), (std::set<int>{1, 2, 3, 4})) << "GPUs with contexts";
  EXPECT_EQ(take_fake_cuda_late_loads(), std::set<std::string>());
  EXPECT_EQ(std::ranges::count(take_fake_cuda_calls(), true, &FakeCudaCall::is_pageable), 0)
      << "such a copy waits in the call until the slowest rank has come";
  return states;
}

TEST(EngineOverNccl, GivesTheBitsOfHosts) {
  for (const std::uint32_t group : {0u, 2u}) {
    for (const std::uint32_t stage : {0u, 1u, 2u, 3u}) {
      for (const DType type : {DType::kFp32, DType::kBf16}) {
        const TempDirectory directory;
        Config config = sharded_config(directory.path(), stage, true, type);
        config.memory.device_bytes = 4_MiB;
        if (stage == 3 && group == 2) config.placement.parameters = TierChoice::kDevice;
        config.sharding.group_ranks = group;
        if (type == DType::kBf16) config.sharding.keep_gathered_bytes = 40'000;  // some units
        const std::vector<StateBytes> expected = on_hosts(config);
        const std::vector<StateBytes> actual = on_gpus(config);
        for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
          EXPECT_TRUE(expected[rank] == expected[0]);
          EXPECT_TRUE(actual[rank] == expected[0]) << "stage " << stage << ", rank " << rank;
        }
      }
    }
  }
}

TEST(EngineOverNccl, NodesGiveTheBitsOfHosts) {
  for (const std::uint32_t stage : {0u, 3u}) {
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    config.memory.device_bytes = 4_MiB;
    config.sharding.reduction = RankReduction::kNodes;
    config.sharding.node_ranks = 2;
    (void)take_fake_nccl_counts(FAKE_NCCL);
    const std::vector<StateBytes> expected = on_hosts(config);
    for (const StateBytes& actual : on_gpus(config)) EXPECT_TRUE(actual == expected[0]);
    EXPECT_EQ(take_fake_nccl_counts(FAKE_NCCL).unequal_offsets, 0) << "stage " << stage;
  }
}

// In a window NCCL takes the caller's offset for every rank's: whichever way a gradient is added
// up, it lies at the same one on all ranks, though they go through their uses at different times.
TEST(EngineOverNccl, TheGradientOfAUseHasOnePlaceOnAllRanks) {
  for (const RankReduction reduction : {RankReduction::kExact, RankReduction::kNccl}) {
    for (const std::uint32_t stage : {0u, 2u}) {
      const TempDirectory directory;
      Config config = sharded_config(directory.path(), stage, true, DType::kFp32);
      config.memory.device_bytes = 4_MiB;
      config.sharding.reduction = reduction;
      if (reduction == RankReduction::kExact) config.sharding.group_ranks = 2;
      (void)take_fake_nccl_counts(FAKE_NCCL);
      const std::vector<StateBytes> actual = on_gpus(config, /*lags=*/true);
      EXPECT_EQ(take_fake_nccl_counts(FAKE_NCCL).unequal_offsets, 0)
          << "stage " << stage << ", reduction " << static_cast<int>(reduction);
      for (std::uint32_t rank = 1; rank < kRanks; ++rank) EXPECT_TRUE(actual[rank] == actual[0]);
    }
  }
}

// All of each rank's state on its GPU, or as far as the budget goes. The device's kernels are
// stand-ins, too: the test is that nothing waits too little, or forever.
TEST(EngineOverNccl, StateOnGpusGivesTheBitsOfHosts) {
  for (const std::uint32_t stage : {0u, 1u, 2u}) {
    const TempDirectory directory;
    Config config = sharded_config(directory.path(), stage, true, DType::kBf16);
    const StateBytes expected = on_hosts(config)[0];
    for (const std::uint64_t device_bytes : {4_MiB, 600_KiB}) {
      config.placement = {};
      config.placement.optimizer = device_bytes == 4_MiB ? TierChoice::kDevice : TierChoice::kAuto;
      config.memory.device_bytes = device_bytes;
      for (const StateBytes& actual : on_gpus(config))
        EXPECT_TRUE(actual == expected) << "stage " << stage << ", " << device_bytes;
    }
  }
}

// Without memory.device a rank takes what its GPU has left when the communicators are there.
TEST(EngineOverNccl, BudgetOfAllThatIsFreeIsReadWhenTheCommunicatorsAreThere) {
  constexpr std::uint32_t kTwo = 2;
  const NcclId id = make_nccl_id(FAKE_NCCL);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < kTwo; ++rank) {
    threads.emplace_back([&, rank] {
      const TempDirectory directory;
      Config config = sharded_config(directory.path(), 2, true, DType::kFp32);
      config.memory.device_bytes.reset();
      const auto device = make_cuda_device({.ordinal = static_cast<int>(rank) + 1});
      const std::uint64_t at_first = device->capacity_bytes();
      const auto collectives =
          make_nccl_collectives(*device, {.timeout_s = 60, .library = FAKE_NCCL}, id, rank, kTwo);
      Engine engine(config, validated(toy_model()), *device, collectives.get());
      // The first one, and gathers, resident gathers, reductions and votes.
      EXPECT_LE(placement_of(engine).device_budget_bytes, at_first - 5 * kFakeCommunicatorBytes);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace sluice::test
