// StepReport::memory against numbers that are counted by hand.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

#include <sluice/units.h>
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// One unit of 1,000 elements, which are 1,024 with padding. Parameters and gradients are bf16. An
// update reads 14 bytes of each element (parameter, remainder, two moments, gradient), and writes
// 12.
constexpr std::uint64_t kElements = 1024;
constexpr std::uint64_t kGradientBytes = 2 * kElements;
constexpr std::uint64_t kUpdateBytes = 26 * kElements;

class MemoryTrafficTest : public testing::Test {
 protected:
  MemoryTrafficTest() {
    config_.memory.unified = UnifiedMemory::kAuto;
    config_.placement = {TierChoice::kHost, TierChoice::kHost};
    config_.optimizer.overlap = OverlapPolicy::kSerial;  // whose updates end with their step
    model_.units = {{.name = "a", .tensors = {{.name = "a", .shape = {1000}}}}};
  }

  // The second of two steps.
  StepReport train(std::uint32_t micro_batches, bool has_own_memory = false) const {
    const auto device = make_host_device({.memory_bytes = 1_MiB, .has_own_memory = has_own_memory});
    Engine engine(config_, model_, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    StepReport report;
    for (int i = 0; i < 2; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-3, .micro_batches = micro_batches});
      for (std::uint32_t batch = 0; batch < micro_batches; ++batch) {
        (void)step.acquire(UnitId{0}, Pass::kForward, stream);
        const Lease lease = step.acquire(UnitId{0}, Pass::kBackward, stream);
        device->launch(stream.id(),
                       [gradient = lease.gradient(0)] { std::memset(gradient, 0x3f, 2 * 1000); });
      }
      report = step.finish();
    }
    engine.close();
    return report;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_;
};

TEST_F(MemoryTrafficTest, OfAStepInMemory) {
  const MemoryTraffic memory = train(1).memory;
  EXPECT_EQ(memory.update_bytes, kUpdateBytes);
  EXPECT_EQ(memory.norm_bytes, kGradientBytes);
  EXPECT_EQ(memory.zero_bytes, kGradientBytes);
  EXPECT_EQ(memory.size_bytes(), kUpdateBytes + 2 * kGradientBytes);
}

TEST_F(MemoryTrafficTest, WithoutZerosWhereGradientsAreOverwritten) {
  model_.overwrites_gradients = true;
  EXPECT_EQ(train(1).memory.size_bytes(), kUpdateBytes + kGradientBytes);
  EXPECT_EQ(train(3).memory.zero_bytes, 0u);
}

// The first gradient is computed in place. The other two come to a slot, are copied and added: each
// addition reads the sum and the gradient, and writes the sum. The last one gives the norm.
TEST_F(MemoryTrafficTest, OfSeveralMicroBatches) {
  const MemoryTraffic memory = train(3).memory;
  EXPECT_EQ(memory.update_bytes, kUpdateBytes);
  EXPECT_EQ(memory.copy_bytes, 2 * 2 * kGradientBytes);
  EXPECT_EQ(memory.sum_bytes, 2 * 3 * kGradientBytes);
  EXPECT_EQ(memory.norm_bytes, 0u);
  EXPECT_EQ(memory.zero_bytes, 3 * kGradientBytes);
  EXPECT_EQ(memory.checksum_bytes, 0u);
}

// Copies have one end in host memory, and the device fills its own slots.
TEST_F(MemoryTrafficTest, BesideADeviceWithMemoryOfItsOwn) {
  const StepReport report = train(2, /*has_own_memory=*/true);
  EXPECT_GT(report.copies.parameter_bytes, 0u);
  EXPECT_EQ(report.copies.gradient_bytes, 2 * kGradientBytes);
  EXPECT_EQ(report.memory.copy_bytes, report.copies.size_bytes());
  EXPECT_EQ(report.memory.sum_bytes, 3 * kGradientBytes);
  EXPECT_EQ(report.memory.norm_bytes + report.memory.zero_bytes, 0u);
}

TEST_F(MemoryTrafficTest, OfChecksums) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config_.storage.verify = Verify::kFull;
  const StepReport report = train(1);
  EXPECT_GT(report.nvme_write_bytes, 0u);
  EXPECT_EQ(report.memory.checksum_bytes, report.nvme_read_bytes + report.nvme_write_bytes);
  config_.storage.verify = Verify::kOff;
  EXPECT_EQ(train(1).memory.checksum_bytes, 0u);
}

// Its gradient of zeros is read by the norm and by the update.
TEST_F(MemoryTrafficTest, OfAUnitWithoutAGradient) {
  model_.units.push_back({.name = "b", .tensors = {{.name = "b", .shape = {1000}}}});
  model_.overwrites_gradients = true;
  const MemoryTraffic memory = train(1).memory;
  EXPECT_EQ(memory.zero_bytes, kGradientBytes);
  EXPECT_EQ(memory.norm_bytes, 2 * kGradientBytes);
  EXPECT_EQ(memory.update_bytes, 2 * kUpdateBytes);
}

}  // namespace
}  // namespace sluice::test
