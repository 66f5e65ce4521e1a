// memory.guard: the memory of a lease is accessible from its acquire to the end of the computation
// under it, and at no other time; and no bit differs.
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>
#include <thread>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/flow/lease_guard.h"
#include "tests/support/accessible.h"
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

ModelSpec guarded_model() {
  ModelSpec model;
  model.units = {{.name = "a", .tensors = {{.name = "a", .shape = {5000}}}},
                 {.name = "b", .tensors = {{.name = "b", .shape = {5000}}}}};
  return model;
}

// A lease is over for the application at once. If its stream is idle, its memory closes before
// release() returns; otherwise, the guard hears of it when computation has ended.
bool becomes_unreadable(const std::byte* address) {
  for (int i = 0; i < 20'000 && is_readable(address); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return !is_readable(address);
}

class LeaseGuardTest : public testing::TestWithParam<TierChoice> {
 protected:
  LeaseGuardTest() {
    config_.memory.guard = GuardMode::kOn;
    config_.placement = {
        .parameters = GetParam(),
        .optimizer = GetParam() == TierChoice::kNvme ? TierChoice::kNvme : TierChoice::kHost};
  }

  void open(const ModelSpec& model = guarded_model()) {
    engine_.emplace(config_, model, *device_);
    engine_->initialize(toy_values());
  }
  Step begin() { return engine_->begin_step({.learning_rate = 1e-3}); }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 4_MiB});
  const Stream stream_{*device_, "compute"};
  std::optional<Engine> engine_;
};

TEST_P(LeaseGuardTest, ALeaseReadsParametersAndWritesGradients) {
  open();
  Step step = begin();
  const std::byte* parameter = nullptr;
  for (const UnitId unit : {UnitId{0}, UnitId{1}}) {
    Lease lease = step.acquire(unit, Pass::kForward, stream_);
    device_->synchronize(stream_.id());
    parameter = lease.parameter(0);
    for (const std::uint64_t byte : {0, 4999, 9999}) EXPECT_TRUE(is_readable(parameter + byte));
    EXPECT_FALSE(is_writable(const_cast<std::byte*>(parameter)));
    lease.release();
    EXPECT_FALSE(is_readable(parameter)) << index_of(unit);
  }
  for (const UnitId unit : {UnitId{1}, UnitId{0}}) {
    Lease lease = step.acquire(unit, Pass::kBackward, stream_);
    device_->synchronize(stream_.id());
    std::byte* const gradient = lease.gradient(0);
    for (const std::uint64_t byte : {0, 4999, 9999}) EXPECT_TRUE(is_writable(gradient + byte));
    lease.release();
    EXPECT_FALSE(is_readable(gradient)) << index_of(unit);
  }
  step.finish();
}

TEST_P(LeaseGuardTest, MemoryStaysUntilTheComputationUnderTheLeaseHasEnded) {
  open();
  Step step = begin();
  Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream_);
  const std::byte* const parameter = lease.parameter(0);
  std::byte seen{};
  device_->launch(stream_.id(), [&seen, parameter] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    seen = *parameter;  // a crash, if the end of the lease had closed it
  });
  lease.release();
  device_->synchronize(stream_.id());
  EXPECT_TRUE(becomes_unreadable(parameter));
}

TEST_P(LeaseGuardTest, OneOfTwoLeasesOnAUnitKeepsIt) {
  ModelSpec model = guarded_model();
  model.concurrent_leases = 2;
  model.forward_order = {UnitId{0}, UnitId{0}, UnitId{1}};
  open(model);
  Step step = begin();
  Lease first = step.acquire(UnitId{0}, Pass::kForward, stream_);
  const Lease second = step.acquire(UnitId{0}, Pass::kForward, stream_);
  device_->synchronize(stream_.id());
  const std::byte* const parameter = second.parameter(0);
  first.release();
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(is_readable(parameter));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_P(LeaseGuardTest, AStepThatIsAbandonedTakesItsLeasesAlong) {
  open();
  std::optional<Step> step = begin();
  const Lease lease = step->acquire(UnitId{0}, Pass::kForward, stream_);
  const std::byte* const parameter = lease.parameter(0);
  EXPECT_TRUE(is_readable(parameter));
  step.reset();
  EXPECT_TRUE(becomes_unreadable(parameter));
}

TEST_P(LeaseGuardTest, OffAndReleaseBuildsLeaveMemoryAlone) {
  for (const GuardMode mode : {GuardMode::kOff, GuardMode::kAuto}) {
    config_.memory.guard = mode;
    open();
    std::optional<Step> step = begin();
    const std::byte* const parameter =
        step->acquire(UnitId{0}, Pass::kForward, stream_).parameter(0);
    step.reset();
#ifndef NDEBUG
    if (mode == GuardMode::kAuto) {
      EXPECT_TRUE(becomes_unreadable(parameter));
      continue;
    }
#endif
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_TRUE(is_readable(parameter)) << name_of(mode);
    engine_.reset();
  }
}

TEST_P(LeaseGuardTest, NoBitDiffers) {
  for (const UnifiedMemory unified : {UnifiedMemory::kAuto, UnifiedMemory::kOff}) {
    for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kSpeculative}) {
      SCOPED_TRACE(fmt::format("unified {}, {}", name_of(unified), name_of(policy)));
      config_.memory.unified = unified;
      config_.optimizer.overlap = policy;
      ToyOptions options{.steps = 3, .micro_batches = 2, .evaluate = true, .leases = 2};
      EXPECT_TRUE(same_training(run_toy(config_, options), toy_oracle(config_, options)));
    }
  }
}

TEST_P(LeaseGuardTest, ActivationsAreGuardedToo) {
  config_.activations.home = ActivationHome::kHost;
  ToyOptions options{.steps = 2, .has_boundaries = true};
  EXPECT_TRUE(same_training(run_toy(config_, options), toy_oracle(config_, options)));
  ModelSpec model = guarded_model();
  model.boundary_bytes = {6000};
  open(model);
  Step step = begin();
  (void)step.acquire(UnitId{0}, Pass::kForward, stream_);
  ActivationLease saved = step.save({.boundary = 0}, stream_);
  std::byte* const data = saved.data();
  EXPECT_TRUE(is_writable(data + 5999));
  device_->synchronize(stream_.id());
  saved.release();
  EXPECT_FALSE(is_readable(data));
}

// The process ends in the instruction that reads.
TEST_P(LeaseGuardTest, AReadAfterTheLeaseEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        open();
        Step step = begin();
        const std::byte* parameter = nullptr;
        {
          const Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream_);
          parameter = lease.parameter(0);
        }
        while (true) (void)*const_cast<const volatile std::byte*>(parameter);
      },
      "");
}

INSTANTIATE_TEST_SUITE_P(Homes, LeaseGuardTest,
                         testing::Values(TierChoice::kNvme, TierChoice::kHost, TierChoice::kDevice),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

}  // namespace
}  // namespace sluice::test
