// Pinned units: parameters on the device under every placement, leases that last while all other
// units come and go, and the bits of any other unit.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "tests/engine/ranks/rank_threads.h"
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kDeviceBytes = 400_KiB;

ModelSpec pinned_model(const std::vector<std::uint32_t>& pinned,
                       const std::vector<std::uint32_t>& frozen = {}) {
  ModelSpec model = toy_model(frozen, /*leases=*/1, ToySize::kSmall);
  for (const std::uint32_t unit : pinned) model.units[unit].is_pinned = true;
  return model;
}

class PinnedUnit : public testing::Test {
 protected:
  PinnedUnit() {
    config_.memory.device_bytes = kDeviceBytes;
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
};

TEST_F(PinnedUnit, ChangesNoBit) {
  using enum OverlapPolicy;
  for (const auto& [parameters, optimizer] : {std::pair{TierChoice::kNvme, TierChoice::kNvme},
                                              {TierChoice::kHost, TierChoice::kNvme},
                                              {TierChoice::kAuto, TierChoice::kHost}}) {
    for (const OverlapPolicy policy : {kSerial, kDeferred, kSpeculative, kEager}) {
      for (const std::vector<std::uint32_t>& frozen :
           {std::vector<std::uint32_t>{}, std::vector<std::uint32_t>{2}}) {
        if (!frozen.empty() && policy != kSerial) continue;
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(parameters), name_of(policy), frozen.size()));
        config_.placement = {parameters, optimizer};
        config_.optimizer.overlap = policy;
        config_.optimizer.clip_norm = policy == kEager ? 0 : 1;
        const ModelSpec model = pinned_model({2, 4}, frozen);
        const ToyOptions options{
            .steps = 3, .evaluate = true, .frozen_units = frozen, .size = ToySize::kSmall};
        const auto device = make_host_device({.memory_bytes = kDeviceBytes});
        Engine engine(config_, model, *device);
        const Layout& layout = layout_of(engine);
        for (const std::uint32_t unit : {2u, 4u})
          EXPECT_TRUE(placement_of(engine).unit_is_on_device(layout.unit(UnitId{unit})));
        EXPECT_TRUE(same_training(run_toy(engine, model, *device, config_, options),
                                  toy_oracle(config_, options)));
      }
    }
  }
}

// Speculation needs a shadow of every other unit. "auto" has shadows only where it may speculate.
TEST_F(PinnedUnit, DoesNotKeepAutoFromSpeculating) {
  config_.optimizer.overlap = OverlapPolicy::kAuto;
  config_.optimizer.clip_norm = 1;
  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  const Engine engine(config_, pinned_model({4}), *device);
  EXPECT_GT(placement_of(engine).shadow_bytes, 0u);
}

// Held from the first use to the last, with one lease for all other units.
TEST_F(PinnedUnit, ItsLeaseLastsThroughTheStep) {
  for (const OverlapPolicy policy :
       {OverlapPolicy::kSerial, OverlapPolicy::kDeferred, OverlapPolicy::kEager}) {
    config_.optimizer.overlap = policy;
    config_.optimizer.clip_norm = 0;
    const ModelSpec model = pinned_model({4});
    const auto device = make_host_device({.memory_bytes = kDeviceBytes});
    Engine engine(config_, model, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const std::size_t bytes = layout_of(engine).unit_parameter_bytes(UnitId{4});
    std::vector<std::byte> before;
    for (int i = 0; i < 3; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      std::optional<Lease> held(step.acquire(UnitId{4}, Pass::kForward, stream));
      device->synchronize(stream.id());
      const std::byte* const place = held->parameter(0);
      const std::vector<std::byte> at_first(place, place + bytes);
      EXPECT_NE(at_first, before) << "the step before has changed it";
      // All uses, also those of the pinned unit.
      walk_step(step, model, engine, *device, stream, config_, 1);
      device->synchronize(stream.id());
      EXPECT_EQ(held->parameter(0), place);
      EXPECT_EQ(std::memcmp(place, at_first.data(), bytes), 0)
          << "no update before the lease has ended, policy " << name_of(policy);
      const std::string words =
          expect_error(ErrorCode::kInvalidArgument, [&] { (void)step.finish(); });
      EXPECT_NE(words.find("1 leases are held"), std::string::npos) << words;
      held.reset();
      EXPECT_EQ(step.finish().step, static_cast<std::uint64_t>(i) + 1);
      before = at_first;
    }
    Inference inference = engine.begin_inference();
    const Lease held = inference.acquire(UnitId{4}, stream);
    for (const std::uint32_t unit : {0u, 1u, 2u, 3u}) (void)inference.acquire(UnitId{unit}, stream);
  }
}

// In backward its lease takes a place for gradients, of which there are as many as leases.
TEST_F(PinnedUnit, OtherLeasesCountAsEver) {
  const ModelSpec model = pinned_model({4});
  const auto device = make_host_device({.memory_bytes = kDeviceBytes});
  Engine engine(config_, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  const auto refuse = [&](UnitId first, Pass pass) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    const Lease held = step.acquire(first, pass, stream);
    const std::string words = expect_error(ErrorCode::kInvalidArgument, [&] {
      (void)step.acquire(UnitId{1}, Pass::kForward, stream);
    });
    EXPECT_NE(words.find("is still held"), std::string::npos) << words;
  };
  refuse(UnitId{0}, Pass::kForward);
  refuse(UnitId{4}, Pass::kBackward);
}

TEST_F(PinnedUnit, ABudgetThatIsTooSmallForItIsRefusedWithOneThatWorks) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  const auto least = [&](const ModelSpec& model) {
    config_.memory.device_bytes = 8_KiB;
    const std::string words = expect_error(ErrorCode::kOutOfMemory,
                                           [&] { const Engine engine(config_, model, *device); });
    const std::size_t at = words.find("works is \"") + 10;
    return parse_size(words.substr(at, words.find('"', at) - at));
  };
  const std::uint64_t plain = least(pinned_model({})), pinned = least(pinned_model({4}));
  config_.memory.device_bytes = pinned;
  const Engine engine(config_, pinned_model({4}), *device);
  EXPECT_LE(pinned, plain + layout_of(engine).unit_parameter_bytes(UnitId{4}) + 8_KiB);
  EXPECT_GT(pinned, plain);
}

// Each rank keeps all of its parameters, whatever the ranks share.
TEST_F(PinnedUnit, IsWholeOnEveryRank) {
  for (const std::uint32_t stage : {1u, 2u, 3u}) {
    const Config config = sharded_config(directory_.path(), stage, true, DType::kBf16);
    const ToyOptions options{
        .steps = 3, .evaluate = true, .size = ToySize::kSmall, .rank_count = 2};
    LocalWorld world(2, {.timeout_s = 60, .sum = sum_in_order});
    std::vector<std::thread> threads;
    const ToyResult expected = toy_oracle(config, options);
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const ModelSpec model = pinned_model({1, 4});
        const auto device = make_host_device({.memory_bytes = 64_MiB});
        const auto collectives = world.join(rank, *device);
        Engine engine(config, model, *device, collectives.get());
        EXPECT_TRUE(placement_of(engine).unit_is_on_device(layout_of(engine).unit(UnitId{4})));
        ToyOptions own = options;
        own.rank = rank;
        EXPECT_TRUE(same_training(run_toy(engine, model, *device, config, own), expected))
            << "stage " << stage << ", rank " << rank;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace sluice::test
