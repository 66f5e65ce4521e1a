// Computation that wants to leave its schedule and cannot, because a unit does not fit beside its
// leases. It goes on as scheduled, and no bit changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// The places of parameters and of the optimizer's state.
class RefusedChangeTest : public testing::TestWithParam<std::tuple<TierChoice, TierChoice>> {
 protected:
  RefusedChangeTest() {
    std::tie(config_.placement.parameters, config_.placement.optimizer) = GetParam();
    config_.precision.gradients = DType::kFp32;
    config_.memory.unified = UnifiedMemory::kOff;
    config_.optimizer.clip_norm = 0;
    config_.optimizer.overlap = OverlapPolicy::kEager;
    config_.memory.host_bytes = 16_MiB;
    // Two large units, which do not fit beside each other.
    for (const std::uint64_t elements : {30'000u, 2'000u, 30'000u, 2'000u}) {
      const std::string name = "u" + std::to_string(model_.units.size());
      model_.units.push_back(
          {.name = name, .tensors = {{.name = name + ".w", .shape = {elements}}}});
    }
    model_.concurrent_leases = 2;
  }

  std::uint64_t smallest_budget() {
    config_.memory.device_bytes = 4_KiB;
    const auto device = make_host_device({.memory_bytes = 1_MiB});
    const std::string message = expect_error(
        ErrorCode::kOutOfMemory, [&] { const Engine engine(config_, model_, *device); });
    const std::size_t begin = message.find("the smallest that works is \"");
    EXPECT_NE(begin, std::string::npos) << message;
    return std::stoull(message.substr(begin + 28)) << 10;
  }

  // In the second step's backward, small unit 1 has been fetched ahead for its last use when large
  // unit 0 is wanted beside large unit 2.
  StateBytes train(std::uint64_t device_bytes, bool is_refused) {
    config_.memory.device_bytes = device_bytes;
    const auto device = make_host_device({.memory_bytes = device_bytes});
    Engine engine(config_, model_, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    for (int number = 0; number < 3; ++number) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      const auto walk = [&](const ToyUses& uses) {
        walk_step(step, uses, engine, *device, stream, config_);
      };
      walk({{UnitId{0}, Pass::kForward, 0},
            {UnitId{1}, Pass::kForward, 1},
            {UnitId{2}, Pass::kForward, 2},
            {UnitId{3}, Pass::kForward, 3},
            {UnitId{3}, Pass::kBackward, 4}});
      Lease large = step.acquire(UnitId{2}, Pass::kBackward, stream);
      device->launch(stream.id(), [gradient = large.gradient<float>(0)] {
        std::fill_n(gradient, 30'000, 0.25f);
      });
      device->synchronize(stream.id());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // the next unit comes meanwhile
      if (is_refused && number == 1) {
        EXPECT_THROW((void)step.acquire(UnitId{0}, Pass::kBackward, stream), Error);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      large.release();
      walk({{UnitId{1}, Pass::kBackward, 6}, {UnitId{0}, Pass::kBackward, 7}});
      copied_bytes_ += step.finish().copies.parameter_bytes;
    }
    engine.drain();
    return read_state(engine);
  }

  std::uint64_t copied_bytes_ = 0;  // parameters brought to the device in all steps
  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_;
};

TEST_P(RefusedChangeTest, ChangesNoBit) {
  const std::uint64_t smallest = smallest_budget();
  EXPECT_TRUE(train(smallest, /*is_refused=*/true) == train(1_MiB, /*is_refused=*/false));
}

// The engine knows what has been fetched, and so what has been overwritten. Nothing comes twice.
TEST_P(RefusedChangeTest, ForgetsNoFetch) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  const std::uint64_t smallest = smallest_budget();
  (void)train(smallest, /*is_refused=*/false);
  const std::uint64_t expected = std::exchange(copied_bytes_, 0);
  (void)train(smallest, /*is_refused=*/true);
  EXPECT_EQ(copied_bytes_, expected);
}

INSTANTIATE_TEST_SUITE_P(Placements, RefusedChangeTest,
                         testing::Values(std::tuple{TierChoice::kNvme, TierChoice::kNvme},
                                         std::tuple{TierChoice::kHost, TierChoice::kNvme},
                                         std::tuple{TierChoice::kHost, TierChoice::kHost}));

}  // namespace
}  // namespace sluice::test
