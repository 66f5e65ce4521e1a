// The engine over a CUDA device and NCCL, both stand-ins, against the engine over host devices and
// collectives between threads: the same bits in every stage. Gradients are copied to the device,
// as computation would leave them there. Runs without a GPU.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "base/units.h"
#include "cpu_optim/ordered_sum.h"
#include "gpu/local_collectives.h"
#include "gpu/nccl_collectives.h"
#include "tests/engine/sharding_cases.h"
#include "tests/support/elements.h"
#include "tests/support/temp_directory.h"

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

StateBytes train(const Config& config, Device& device, Collectives& collectives) {
  const ModelSpec model = validated(toy_model());
  Engine engine(config, model, device, {}, &collectives);
  engine.initialize(toy_values());
  const Stream stream(device, "compute");
  const DType type = config.precision.gradients;
  for (std::uint64_t number = 0; number < kSteps; ++number) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      const auto tensors = engine.layout().tensors_of(unit);
      for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
        const std::uint64_t count = tensors[tensor].element_count;
        PinnedGradient gradient(device, count * size_of(type));
        for (std::uint64_t i = 0; i < count; ++i)
          save(type, gradient.data(), i,
               gradient_of(collectives.rank(), number, index_of(unit), i + tensor));
        device.copy(lease.gradient(tensor), gradient.data(), count * size_of(type), stream.id());
        device.synchronize(stream.id());
      }
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
    return train(config, *device, *collectives);
  });
}

std::vector<StateBytes> on_gpus(const Config& config) {
  const NcclId id = make_nccl_id(FAKE_NCCL);
  return on_threads([&](std::uint32_t rank) {
    const auto device =
        make_cuda_device({.memory_bytes = 192_MiB, .memory_source = nccl_memory_source(FAKE_NCCL)});
    const auto collectives =
        make_nccl_collectives(*device, {.timeout_s = 60, .library = FAKE_NCCL}, id, rank, kRanks);
    return train(config, *device, *collectives);
  });
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

// All of each rank's state on its GPU, or as far as the budget goes. The device's kernels are
// stand-ins, too: what is tested is that nothing waits too little, or for ever.
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

}  // namespace
}  // namespace sluice::test
