// Leases and updates without copies, on a device that shares the host's memory: how much is copied
// where, that held leases keep their bytes, and the devices and budgets that this needs.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/plan.h>
#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::array kPolicies{OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                               OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

class UnifiedMemoryTest : public testing::Test {
 protected:
  UnifiedMemoryTest() {
    config_.memory.unified = UnifiedMemory::kAuto;
    config_.memory.guard = GuardMode::kOff;  // tests look at memory after its lease
    config_.placement = {TierChoice::kHost, TierChoice::kHost};
    config_.optimizer.clip_norm = 0;
    config_.optimizer.overlap = OverlapPolicy::kDeferred;
  }

  // The copies of a step that is neither the first nor the last.
  CopyTraffic copies() {
    const ToyResult result = run_toy(config_, options_);
    EXPECT_TRUE(same_training(result, toy_oracle(config_, options_)));
    return result.reports.at(2).copies;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ToyOptions options_{.steps = 4};
};

// The bytes of all units with padding, of which the toy uses one twice.
struct ToyBytes {
  std::uint64_t units = 0;
  std::uint64_t backward_uses = 0;
};
ToyBytes bytes_of(const ModelSpec& given) {
  const ModelSpec model = validated(given);
  std::vector<std::uint64_t> unit_bytes;
  for (const UnitSpec& unit : model.units) {
    std::uint64_t elements = 0;
    for (const TensorSpec& tensor : unit.tensors)
      elements += align_up(tensor.element_count(), std::uint64_t{256});
    unit_bytes.push_back(2 * elements);
  }
  ToyBytes bytes;
  for (const std::uint64_t unit : unit_bytes) bytes.units += unit;
  for (const UnitId unit : model.backward_order) bytes.backward_uses += unit_bytes[index_of(unit)];
  return bytes;
}

TEST_F(UnifiedMemoryTest, AUnitsFirstGradientAndItsParametersAreNotCopied) {
  const ToyBytes bytes = bytes_of(toy_model());
  ASSERT_GT(bytes.backward_uses, bytes.units);
  for (const TierChoice home : {TierChoice::kHost, TierChoice::kDevice}) {
    config_.placement.parameters = home;
    for (const OverlapPolicy policy :
         {OverlapPolicy::kSerial, OverlapPolicy::kDeferred, OverlapPolicy::kEager}) {
      config_.optimizer.overlap = policy;
      for (const std::uint32_t micro_batches : {1u, 2u}) {
        SCOPED_TRACE(
            fmt::format("{}, {}, {} micro-batches", name_of(home), name_of(policy), micro_batches));
        options_.micro_batches = micro_batches;
        const CopyTraffic copied = copies();
        EXPECT_EQ(copied.parameter_bytes, 0u);
        EXPECT_EQ(copied.update_bytes, 0u);
        // The rest is added to the first one.
        EXPECT_EQ(copied.gradient_bytes, micro_batches * bytes.backward_uses - bytes.units);
      }
    }
  }
}

TEST_F(UnifiedMemoryTest, OffCopiesAsOnAGpu) {
  const ToyBytes bytes = bytes_of(toy_model());
  config_.memory.unified = UnifiedMemory::kOff;
  config_.optimizer.overlap = OverlapPolicy::kSerial;  // whose updates end with their step
  config_.memory.device_bytes = 400_KiB;
  const CopyTraffic copied = copies();
  EXPECT_GE(copied.parameter_bytes, bytes.units);
  EXPECT_EQ(copied.gradient_bytes, bytes.backward_uses);
  EXPECT_EQ(copied.update_bytes, 0u);
  config_.memory.device_bytes = 4_MiB;
  config_.placement.parameters = TierChoice::kDevice;
  const CopyTraffic of_device = copies();
  EXPECT_EQ(of_device.parameter_bytes, 0u);
  EXPECT_EQ(of_device.update_bytes, 2 * bytes.units) << "down and up";
}

// Without a window, the device holds gradient slots alone.
TEST_F(UnifiedMemoryTest, UnitsInHostMemoryTakeNoDeviceMemory) {
  options_.steps = 2;
  std::uint64_t needed[2] = {};
  for (const bool is_off : {false, true}) {
    config_.memory.unified = is_off ? UnifiedMemory::kOff : UnifiedMemory::kAuto;
    config_.memory.device_bytes = 1_KiB;
    const std::string message = expect_error(ErrorCode::kOutOfMemory, [&] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const Engine engine(config_, toy_model(), *device);
    });
    const std::string before = "the smallest that works is \"";
    const std::size_t begin = message.find(before) + before.size();
    needed[is_off ? 1 : 0] = parse_size(message.substr(begin, message.find('"', begin) - begin));
    config_.memory.device_bytes = needed[is_off ? 1 : 0];
    EXPECT_TRUE(same_training(run_toy(config_, options_), toy_oracle(config_, options_)));
  }
  EXPECT_LT(needed[0], needed[1]);
}

TEST_F(UnifiedMemoryTest, AGradientInTheSetIsZeroAtFirst) {
  ModelSpec model;
  model.units = {{.name = "a", .tensors = {{.name = "a", .shape = {1000}}}}};
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Engine engine(config_, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  for (int i = 0; i < 3; ++i) {
    Step step = engine.begin_step({.learning_rate = 1e-3});
    (void)step.acquire(UnitId{0}, Pass::kForward, stream);
    {
      const Lease lease = step.acquire(UnitId{0}, Pass::kBackward, stream);
      device->synchronize(stream.id());
      const std::byte* const gradient = lease.gradient(0);
      EXPECT_EQ(std::count(gradient, gradient + 2000, std::byte{}), 2000) << "step " << i;
      std::memset(lease.gradient(0), 0x3f, 2000);
    }
    EXPECT_EQ(step.finish().copies.size_bytes(), 0u);
  }
  engine.close();
}

ModelSpec two_units() {
  ModelSpec model;
  model.units = {{.name = "a", .tensors = {{.name = "a", .shape = {1000}}}},
                 {.name = "b", .tensors = {{.name = "b", .shape = {1000}}}}};
  return model;
}

std::vector<std::byte> parameters_of_b(Engine& engine) {
  std::vector<std::byte> parameters(2000);
  engine.read_state(TensorId{1}, StateKind::kParameter, 0, parameters);
  return parameters;
}

// Computation that reads a unit's parameters when an update that does not wait has written them.
class SlowReader {
 public:
  SlowReader(HostDevice& device, const Stream& stream) : device_(device), stream_(stream) {}
  void read(const Lease& lease) {
    const std::byte* const parameter = lease.parameter(0);
    before_.assign(parameter, parameter + 2000);
    device_.launch(stream_.id(), [parameter, this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      seen_.assign(parameter, parameter + 2000);
    });
  }
  const std::vector<std::byte>& before() const { return before_; }
  const std::vector<std::byte>& seen() const { return seen_; }

 private:
  HostDevice& device_;
  const Stream& stream_;
  std::vector<std::byte> before_, seen_;
};

// Whether the bytes have not changed. The update may be changing them: ThreadSanitizer does not
// look at this read.
[[gnu::no_sanitize("thread")]] bool are_still(const volatile std::byte* bytes,
                                              const std::vector<std::byte>& before) {
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (bytes[i] != before[i]) return false;
  }
  return true;
}

// The eager policy updates a unit when its gradient is final, but this unit is still leased.
TEST_F(UnifiedMemoryTest, AnUpdateWaitsForTheLeasesOnItsUnit) {
  config_.optimizer.overlap = OverlapPolicy::kEager;
  for (const TierChoice home : {TierChoice::kHost, TierChoice::kDevice}) {
    config_.placement.parameters = home;
    ModelSpec model = two_units();
    model.concurrent_leases = 3;
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config_, model, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const Stream slow(*device, "slow");
    Step step = engine.begin_step({.learning_rate = 1});
    (void)step.acquire(UnitId{0}, Pass::kForward, stream);
    Lease held = step.acquire(UnitId{1}, Pass::kForward, slow);
    const auto* const parameter = held.parameter(0);
    const std::vector<std::byte> before(parameter, parameter + 2000);
    // The gradient of b is final first, but only a may be updated.
    const std::byte* other = nullptr;
    std::vector<std::byte> other_before;
    for (const UnitId unit : {UnitId{1}, UnitId{0}}) {
      const Lease backward = step.acquire(unit, Pass::kBackward, stream);
      other = backward.parameter(0);
      other_before.assign(other, other + 2000);
      std::memset(backward.gradient(0), 0x3f, 2000);
    }
    device->synchronize(stream.id());
    for (int i = 0; i < 10'000 && are_still(other, other_before); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_FALSE(are_still(other, other_before)) << name_of(home);
    EXPECT_EQ(std::memcmp(parameter, before.data(), before.size()), 0) << name_of(home);
    // Nor does the end of the lease let the update begin: its computation goes on.
    SlowReader reader(*device, slow);
    reader.read(held);
    held.release();
    step.finish();
    engine.drain();
    device->synchronize(slow.id());
    EXPECT_EQ(reader.seen(), before) << name_of(home);
    EXPECT_NE(parameters_of_b(engine), before);
    engine.close();
  }
}

// The unit gets no gradient, so nothing else in the step waits for its computation. Under the eager
// policy, nothing else would hold its update back until finish() has its gradient of zeros.
TEST_F(UnifiedMemoryTest, UpdatesWaitForComputationWithoutAGradient) {
  for (const OverlapPolicy policy : kPolicies) {
    config_.optimizer.overlap = policy;
    for (const TierChoice home : {TierChoice::kHost, TierChoice::kDevice}) {
      SCOPED_TRACE(fmt::format("{}, {}", name_of(policy), name_of(home)));
      config_.placement.parameters = home;
      const auto device = make_host_device({.memory_bytes = 1_MiB});
      Engine engine(config_, two_units(), *device);
      engine.initialize(toy_values());
      const Stream stream(*device, "compute");
      const Stream slow(*device, "slow");
      Step step = engine.begin_step({.learning_rate = 1});  // weight decay changes b
      (void)step.acquire(UnitId{0}, Pass::kForward, stream);
      SlowReader reader(*device, slow);
      reader.read(step.acquire(UnitId{1}, Pass::kForward, slow));
      (void)step.acquire(UnitId{0}, Pass::kBackward, stream);
      step.finish();
      engine.drain();
      device->synchronize(slow.id());
      EXPECT_EQ(reader.seen(), reader.before());
      EXPECT_NE(parameters_of_b(engine), reader.before());
      engine.close();
    }
  }
}

// The unit has had a gradient, but its schedule has changed: a forward use comes behind it.
TEST_F(UnifiedMemoryTest, UpdatesWaitForComputationBehindAGradient) {
  for (const OverlapPolicy policy : kPolicies) {
    config_.optimizer.overlap = policy;
    SCOPED_TRACE(name_of(policy));
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config_, two_units(), *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const Stream slow(*device, "slow");
    Step step = engine.begin_step({.learning_rate = 1});
    (void)step.acquire(UnitId{0}, Pass::kForward, stream);
    (void)step.acquire(UnitId{0}, Pass::kBackward, stream);  // unexpected: nothing is final now
    (void)step.acquire(UnitId{1}, Pass::kBackward, stream);
    SlowReader reader(*device, slow);
    reader.read(step.acquire(UnitId{1}, Pass::kForward, slow));
    (void)step.acquire(UnitId{0}, Pass::kBackward, stream);
    step.finish();
    engine.drain();
    device->synchronize(slow.id());
    EXPECT_EQ(reader.seen(), reader.before());
    EXPECT_NE(parameters_of_b(engine), reader.before());
    engine.close();
  }
}

// The unit has had a gradient, but a lease that began before is released behind it.
TEST_F(UnifiedMemoryTest, UpdatesWaitForALeaseThatEndsBehindAGradient) {
  for (const OverlapPolicy policy : kPolicies) {
    config_.optimizer.overlap = policy;
    SCOPED_TRACE(name_of(policy));
    ModelSpec model = two_units();
    model.concurrent_leases = 3;
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    Engine engine(config_, model, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const Stream slow(*device, "slow");
    Step step = engine.begin_step({.learning_rate = 1});
    SlowReader reader(*device, slow);
    Lease held = step.acquire(UnitId{1}, Pass::kForward, slow);  // unexpected: nothing is final
    (void)step.acquire(UnitId{1}, Pass::kBackward, stream);
    reader.read(held);
    held.release();
    (void)step.acquire(UnitId{0}, Pass::kBackward, stream);
    step.finish();
    engine.drain();
    device->synchronize(slow.id());
    EXPECT_EQ(reader.seen(), reader.before());
    EXPECT_NE(parameters_of_b(engine), reader.before());
    engine.close();
  }
}

// Inferences and abandoned steps are no part of the next step.
TEST_F(UnifiedMemoryTest, AStepReportsItsOwnCopies) {
  config_.memory.unified = UnifiedMemory::kOff;
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Engine engine(config_, two_units(), *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  const auto use_all = [&](Step& step) {
    for (const std::uint32_t unit : {0u, 1u})
      (void)step.acquire(UnitId{unit}, Pass::kForward, stream);
    for (const std::uint32_t unit : {1u, 0u})
      (void)step.acquire(UnitId{unit}, Pass::kBackward, stream);
  };
  const auto train = [&] {
    Step step = engine.begin_step({.learning_rate = 1});
    use_all(step);
    return step.finish().copies;
  };
  (void)train();
  const CopyTraffic expected = train();
  EXPECT_GT(expected.parameter_bytes, 0u);
  EXPECT_GT(expected.gradient_bytes, 0u);
  const auto expect_the_same = [&](const char* after) {
    const CopyTraffic copied = train();
    EXPECT_EQ(copied.parameter_bytes, expected.parameter_bytes) << after;
    EXPECT_EQ(copied.gradient_bytes, expected.gradient_bytes) << after;
    EXPECT_EQ(copied.update_bytes, expected.update_bytes) << after;
  };
  {
    Inference inference = engine.begin_inference();
    for (const std::uint32_t unit : {0u, 1u}) (void)inference.acquire(UnitId{unit}, stream);
  }
  expect_the_same("an inference");
  {
    Step step = engine.begin_step({.learning_rate = 1});
    use_all(step);
  }
  expect_the_same("an abandoned step");
  engine.close();
}

TEST_F(UnifiedMemoryTest, OnIsRefusedForADeviceWithMemoryOfItsOwnAndForSeveralRanks) {
  config_.memory.unified = UnifiedMemory::kOn;
  const auto host = make_host_device({.memory_bytes = 4_MiB});
  const Engine engine(config_, toy_model(), *host);
  const auto device = make_host_device({.memory_bytes = 4_MiB, .has_own_memory = true});
  const std::string message = expect_error(
      ErrorCode::kConfig, [&] { const Engine refused(config_, toy_model(), *device); });
  EXPECT_NE(message.find("memory.unified is \"on\", but the device has memory of its own"),
            std::string::npos)
      << message;
  const std::string several = expect_error(ErrorCode::kConfig, [&] {
    (void)plan(config_, toy_model(), {.ranks = 2, .host_memory_bytes = 1_GiB});
  });
  EXPECT_NE(several.find("memory.unified is \"on\", but 2 ranks train together"), std::string::npos)
      << several;
}

}  // namespace
}  // namespace sluice::test
