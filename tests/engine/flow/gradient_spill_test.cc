// Gradients that wait for their update on storage or on the device: the same bits as in host memory
// under every policy, the bytes that the plan says, and whatever may go wrong on the way named.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/planner/run_plan.h"
#include "tests/support/campaign.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/side_by_side.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kDeviceBytes = 2_MiB;

class GradientSpill : public testing::Test {
 protected:
  GradientSpill() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = kDeviceBytes;
  }

  ToyResult train(const ToyOptions& options, const FaultOptions& faults = {}) {
    return train(options, faults, placement_);
  }
  // Several at once, each with a placement of its own.
  ToyResult train(const ToyOptions& options, const FaultOptions& faults,
                  Placement& placement) const {
    const auto device = make_host_device({.memory_bytes = kDeviceBytes});
    Engine engine = EngineOverQueue::make(
        config_, model_, *device,
        [&](std::unique_ptr<IoQueue> queue) { return make_fault_queue(std::move(queue), faults); });
    placement = placement_of(engine);
    return run_toy(engine, model_, *device, config_, options);
  }
  void expect_oracle(const ToyOptions& options, const FaultOptions& faults = {}) {
    EXPECT_TRUE(same_training(train(options, faults), toy_oracle(config_, options)));
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  Placement placement_;
};

TEST_F(GradientSpill, ChangesNoBit) {
  for (const TierChoice tier : {TierChoice::kNvme, TierChoice::kDevice}) {
    for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                       OverlapPolicy::kEager, OverlapPolicy::kSpeculative}) {
      for (const MicroBatchOrder order :
           {MicroBatchOrder::kHorizontal, MicroBatchOrder::kVertical}) {
        for (const double clip_norm : {0.0, 1e-3}) {
          if (policy == OverlapPolicy::kEager && clip_norm != 0) continue;
          SCOPED_TRACE(fmt::format("{}, {}, clip_norm {}, gradients in {}", name_of(policy),
                                   name_of(order), clip_norm,
                                   tier == TierChoice::kNvme ? "nvme" : "device"));
          config_.placement.gradients = tier;
          config_.optimizer.overlap = policy;
          config_.optimizer.clip_norm = clip_norm;
          expect_oracle({.steps = 3, .micro_batches = 3, .order = order, .evaluate = true});
          EXPECT_EQ(placement_.gradient_set_bytes, 0u);
        }
      }
    }
  }
}

// All in memory but the gradients.
TEST_F(GradientSpill, StateInMemoryNeedsLanesForItsGradientsAlone) {
  config_.placement.parameters = config_.placement.optimizer = TierChoice::kHost;
  expect_oracle({.steps = 3, .micro_batches = 2});
  EXPECT_EQ(placement_.lanes.size_bytes(), 0u);
  EXPECT_GT(placement_.lane_gradients.size_bytes(), 0u);
  EXPECT_EQ(placement_.nvme_bytes(), placement_.nvme_gradient_bytes);
}

// Each backward use writes a gradient; all but the first of a unit read the sum, and so does the
// update. Under `serial`, traffic is exact.
TEST_F(GradientSpill, MovesWhatThePlanSays) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  std::uint64_t spilled = 0;
  for (const TierChoice tier : {TierChoice::kHost, TierChoice::kNvme}) {
    config_.placement.gradients = tier;
    const ToyResult result = train({.steps = 3, .micro_batches = 2});
    const Traffic& predicted = result.predicted;
    for (const StepReport& report : result.reports) {
      EXPECT_EQ(report.nvme_read_bytes, predicted.nvme_read_bytes);
      EXPECT_EQ(report.nvme_write_bytes, predicted.nvme_write_bytes);
    }
    if (tier == TierChoice::kHost) {
      EXPECT_EQ(predicted.gradient_spill_bytes, 0u);
      spilled = predicted.nvme_write_bytes;
      continue;
    }
    // The embedding is used twice in each of the two backward passes.
    const Layout layout(validated(model_), state_format(config_), config_.storage.block_elements);
    std::uint64_t expected = 0;
    for (const UnitPlace& unit : layout.units()) {
      for (const BlockPlace& block : layout.blocks_of(unit.id))
        expected += (unit.name == "embedding" ? 4 : 2) * align_up(block.element_count * 2, 4096);
    }
    EXPECT_EQ(predicted.gradient_spill_bytes, expected);
    EXPECT_EQ(predicted.nvme_write_bytes, spilled + expected);
  }
}

// As few as the budget asks for, from the last unit on; and never where it can hold them all beside
// two lanes.
TEST_F(GradientSpill, AutoSpillsTheLastUnitsAndNoMoreThanItMust) {
  config_.placement.gradients = TierChoice::kHost;
  config_.memory.host_bytes = 1_KiB;
  const std::string message = expect_error(ErrorCode::kOutOfMemory, [&] { (void)train({}); });
  const std::string before = "the smallest that works is \"";
  const std::size_t begin = message.find(before) + before.size();
  const std::uint64_t for_one_lane =
      parse_size(message.substr(begin, message.find('"', begin) - begin));
  config_.placement.gradients = TierChoice::kAuto;
  const Layout layout(validated(model_), state_format(config_), config_.storage.block_elements);
  std::uint64_t enough = for_one_lane;
  const auto placement = [&] {
    config_.memory.host_bytes = enough;
    return plan_run(config_, validated(model_), layout, {.device_bytes = kDeviceBytes}).placement;
  };
  while (placement().gradients_leave()) enough += 1_KiB;
  EXPECT_GT(enough, for_one_lane);
  (void)train({.steps = 1});
  EXPECT_FALSE(placement_.gradients_leave());
  EXPECT_EQ(placement_.lanes.count, 2u);
  config_.memory.host_bytes = enough - 1_KiB;
  config_.memory.device_bytes = 290_KiB;  // nothing to spare
  expect_oracle({.steps = 3, .micro_batches = 2});
  EXPECT_TRUE(placement_.gradients_leave());
  const auto& tiers = placement_.gradient_tier;
  EXPECT_EQ(tiers.front(), Tier::kHost);
  const auto is_at_home = [](Tier tier) { return tier == Tier::kHost; };
  EXPECT_TRUE(std::ranges::is_partitioned(tiers, is_at_home));
  EXPECT_GT(placement_.nvme_gradient_bytes, 0u);
  const auto first =
      static_cast<std::uint32_t>(std::ranges::find_if_not(tiers, is_at_home) - tiers.begin());
  EXPECT_LE(placement_.host_bytes(), enough - 1_KiB);
  EXPECT_EQ(placement_.lane_gradients.count, placement_.lanes.count);
  EXPECT_GT(placement_.host_bytes() + align_up(layout.set_gradient_bytes(UnitId{first}), 4096),
            enough - 1_KiB)
      << "one unit more would have fitted";
}

TEST_F(GradientSpill, AutoPrefersTheDevicesRoom) {
  config_.placement.gradients = TierChoice::kAuto;
  config_.memory.host_bytes = 200_KiB;
  expect_oracle({.steps = 2});
  EXPECT_GT(placement_.device_gradient_bytes, 0u);
  EXPECT_EQ(placement_.nvme_gradient_bytes, 0u);
}

// A unit that backward leaves out has a gradient of zeros, which replaces the one before; and not
// while the update before may still want that one, however late it is.
TEST_F(GradientSpill, UnitsLeftOutHaveGradientsOfZeros) {
  const ToyOptions options{.steps = 4, .change = [](std::uint64_t step, ToyUses& uses) {
                             if (step % 2 == 0)
                               std::erase_if(uses, [](const ToyUse& use) {
                                 return use.unit == UnitId{4} || use.unit == UnitId{5};
                               });
                           }};
  config_.optimizer.lanes = 1;
  for (const TierChoice tier : {TierChoice::kNvme, TierChoice::kDevice, TierChoice::kHost}) {
    config_.placement.gradients = tier;
    expect_oracle(options, {.seed = 3, .delay_us_max = 1000});
  }
}

TEST_F(GradientSpill, NonFiniteGradientsAreNamed) {
  config_.optimizer.non_finite = NonFinitePolicy::kStop;
  for (const TierChoice tier : {TierChoice::kNvme, TierChoice::kDevice}) {
    config_.placement.gradients = tier;
    const auto device = make_host_device({.memory_bytes = kDeviceBytes});
    Engine engine(config_, model_, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const ModelSpec model = validated(model_);
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      if (unit != UnitId{3}) continue;
      auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(1));
      device->launch(stream.id(), [gradient] {
        gradient[9'001] = 0x7f80;
        gradient[9'002] = 0x7fc0;
      });
    }
    const std::string message = expect_error(ErrorCode::kNonFinite, [&] { (void)step.finish(); });
    EXPECT_NE(message.find("\"h.2.fc\" (unit \"h.2\") is not finite at element 9001"),
              std::string::npos)
        << message;
  }
}

// Whichever request fails, or brings other bytes: an error that says what it was about, no hang.
TEST_F(GradientSpill, FailedAndDamagedTransfersAreNamed) {
  std::atomic<std::uint64_t> named = 0;
  for (const auto& [fault, code] :
       {std::pair{Fault::kErrno, ErrorCode::kIo}, {Fault::kBitFlip, ErrorCode::kDamaged}}) {
    side_by_side(seeds_of(campaign(60)), [&, fault = fault, code = code](std::uint64_t seed) {
      const std::uint64_t at = 64 + seed * 37 % 500;
      const Watchdog watchdog(std::chrono::seconds(60), fmt::format("request {}", at));
      try {
        Placement placement;
        (void)train({.steps = 3}, {.fault = fault, .at = at, .error = ENXIO}, placement);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        named += std::string(error.what()).find("(gradients)") != std::string::npos ? 1 : 0;
      }
    });
  }
  if (campaign(60).cases >= 60) {
    EXPECT_GE(named, 2u);
  }
}

// A step that is given up while lanes read gradients: the next one writes them again.
TEST_F(GradientSpill, AnAbandonedStepLeavesNothingBehind) {
  for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative}) {
    config_.optimizer.overlap = policy;
    const auto device = make_host_device({.memory_bytes = kDeviceBytes});
    Engine engine =
        EngineOverQueue::make(config_, model_, *device, [](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.seed = 9, .delay_us_max = 500});
        });
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const auto walk = [&](bool is_finished) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      walk_step(step, model_, engine, *device, stream, config_, 1);
      if (is_finished) (void)step.finish();
    };
    for (const bool is_finished : {true, false, true, false, false, true}) walk(is_finished);
    EXPECT_TRUE(read_state(engine) == toy_oracle(config_, {.steps = 3}).state);
  }
}

}  // namespace
}  // namespace sluice::test
