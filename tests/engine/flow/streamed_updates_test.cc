// Blocks at home in host memory or on storage that the device updates: the bits of the CPU, the
// bytes that the design names, and words for what goes wrong there.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

constexpr OverlapPolicy kUpdatePolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                             OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

class StreamedUpdates : public testing::Test {
 protected:
  StreamedUpdates() { config_.optimizer.update_on = UpdateProcessor::kDevice; }

  ToyResult train(const ToyOptions& options) {
    const std::uint64_t bytes = config_.memory.device_bytes.value_or(64_MiB);
    const auto device = make_host_device({.memory_bytes = bytes, .has_own_memory = true});
    const ModelSpec model = toy_model(options.frozen_units);
    Engine engine(config_, model, *device);
    placement_ = placement_of(engine);
    EXPECT_EQ(device->allocated_bytes(), placement_.device_bytes());
    return run_toy(engine, model, *device, config_, options);
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  Placement placement_;
};

TEST_F(StreamedUpdates, EveryOptimizerAndStateGivesTheBitsOfTheCpu) {
  config_.placement = {TierChoice::kNvme, TierChoice::kHost};
  for (const OptimizerKind kind :
       {OptimizerKind::kAdamW, OptimizerKind::kAdam, OptimizerKind::kLion, OptimizerKind::kAdagrad,
        OptimizerKind::kSgd}) {
    for (const OptimizerState state :
         {OptimizerState::kFp32, OptimizerState::kBf16, OptimizerState::k8bit}) {
      for (const DType type : {DType::kBf16, DType::kFp32, DType::kFp16}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(kind), name_of(state), name_of(type)));
        config_.optimizer.kind = kind;
        config_.optimizer.state = state;
        config_.precision = {.parameters = type, .gradients = type};
        const ToyOptions options{.steps = 3, .micro_batches = 2};
        config_.optimizer.update_on = UpdateProcessor::kCpu;
        const ToyResult expected = train(options);
        config_.optimizer.update_on = UpdateProcessor::kDevice;
        EXPECT_TRUE(same_training(train(options), expected));
      }
    }
  }
}

// Parameters and gradients that are on the device stay there. Everything else goes each way once.
TEST_F(StreamedUpdates, TheCopiesAreThoseOfThePlan) {
  config_.optimizer.overlap = OverlapPolicy::kSerial;
  struct Homes {
    TierChoice parameters, gradients;
    std::uint64_t bytes_per_element;  // both ways: 10 of the record, 2 of each of the others
  };
  for (const Homes homes : {Homes{TierChoice::kDevice, TierChoice::kDevice, 20},
                            Homes{TierChoice::kDevice, TierChoice::kHost, 22},
                            Homes{TierChoice::kHost, TierChoice::kHost, 26}}) {
    config_.placement = {homes.parameters, TierChoice::kHost, homes.gradients};
    const ToyResult result = train({.steps = 3});
    const Layout layout(validated(toy_model()), state_format(config_),
                        config_.storage.block_elements);
    std::uint64_t bytes = 0;
    for (const BlockPlace& block : layout.blocks())
      bytes += homes.bytes_per_element * block.element_count + sizeof(std::uint32_t);
    for (const StepReport& report : result.reports)
      EXPECT_EQ(report.copies.update_bytes, bytes) << homes.bytes_per_element;
    EXPECT_EQ(placement_.lane_gradients.count, 0u);
  }
}

TEST_F(StreamedUpdates, NoBlockIsUpdatedOnTheCpu) {
  for (const OverlapPolicy policy : kUpdatePolicies) {
    config_.optimizer.overlap = policy;
    config_.optimizer.clip_norm = policy == OverlapPolicy::kEager ? 0 : 1e9;
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    trace_enable(1 << 16);
    (void)train({.steps = 3});
    const std::vector<TraceRecord> records = trace_take();
    trace_enable(0);
    std::uint64_t on_device = 0;
    for (const TraceRecord& record : records) {
      EXPECT_NE(record.kind, TraceKind::kAdam);
      if (record.kind == TraceKind::kOnDevice && record.detail == kTraceOptimizerState) ++on_device;
    }
    const Layout layout(validated(toy_model()), state_format(config_),
                        config_.storage.block_elements);
    EXPECT_EQ(on_device, 3 * layout.blocks().size()) << name_of(policy);
  }
}

// One place on the device for blocks is enough; one KiB less than the smallest budget is an error
// that names the budget.
TEST_F(StreamedUpdates, TheSmallestBudgetNamedWorks) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  const auto smallest_budget = [&] {
    const std::string message =
        expect_error(ErrorCode::kOutOfMemory, [&] { (void)train({.steps = 1}); });
    const std::string before = "the smallest that works is \"";
    const std::size_t begin = message.find(before) + before.size();
    return parse_size(message.substr(begin, message.find('"', begin) - begin));
  };
  config_.memory.device_bytes = 1_KiB;
  const std::uint64_t enough = smallest_budget();
  config_.memory.device_bytes = enough - 1_KiB;
  EXPECT_EQ(smallest_budget(), enough);
  config_.memory.device_bytes = enough;
  const ToyOptions options{.steps = 3, .micro_batches = 2};
  EXPECT_TRUE(same_training(train(options), toy_oracle(config_, options)));
  EXPECT_EQ(placement_.update_staging.count, 1u);
}

TEST_F(StreamedUpdates, SlowDevicesGiveTheOraclesBits) {
  const ToyOptions options{.steps = 4, .micro_batches = 2};
  for (const OverlapPolicy policy : kUpdatePolicies) {
    config_.optimizer.overlap = policy;
    config_.optimizer.clip_norm = policy == OverlapPolicy::kEager ? 0 : 160;
    const ToyResult expected = toy_oracle(config_, options);
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
      config_.placement = {seed % 2 == 0 ? TierChoice::kDevice : TierChoice::kNvme,
                           seed % 3 == 0 ? TierChoice::kHost : TierChoice::kNvme};
      const auto device = make_delayed_device(
          make_host_device({.memory_bytes = 64_MiB, .has_own_memory = true}), seed, 1000);
      const TaskDelays delays(seed, 500);
      const Watchdog watchdog(std::chrono::seconds(60), "updates on a slow device");
      const ModelSpec model = toy_model();
      Engine engine(config_, model, *device);
      EXPECT_TRUE(same_training(run_toy(engine, model, *device, config_, options), expected))
          << name_of(policy) << ", seed " << seed;
    }
  }
}

// Units with missed updates make up for them on the CPU, the others are updated on the device.
TEST_F(StreamedUpdates, LateUpdatesGiveTheOraclesBits) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  const ToyOptions options{.steps = 6, .change = [](std::uint64_t step, ToyUses& uses) {
                             if (step < 2 || step > 4) return;
                             std::erase_if(uses, [](const ToyUse& use) {
                               return index_of(use.unit) == 2 || index_of(use.unit) == 3;
                             });
                           }};
  const ToyResult expected = train(options);
  config_.optimizer.untouched = UntouchedPolicy::kLazy;
  EXPECT_TRUE(train(options).state == expected.state);
}

// The same words as after an update on the CPU.
TEST_F(StreamedUpdates, AWeightThatOverflowsIsNamed) {
  for (const TierChoice parameters : {TierChoice::kDevice, TierChoice::kHost, TierChoice::kNvme}) {
    for (const OverlapPolicy policy : kUpdatePolicies) {
      std::string messages[2];
      for (const UpdateProcessor processor : {UpdateProcessor::kCpu, UpdateProcessor::kDevice}) {
        config_.placement = {parameters, TierChoice::kHost};
        config_.optimizer.update_on = processor;
        config_.optimizer.overlap = policy;
        config_.optimizer.clip_norm = 0;
        const auto device = make_host_device({.memory_bytes = 64_MiB, .has_own_memory = true});
        const ModelSpec model = toy_model();
        Engine engine(config_, model, *device);
        engine.initialize(toy_values());
        const Stream stream(*device, "compute");
        messages[static_cast<int>(processor)] = expect_error(ErrorCode::kNonFinite, [&] {
          Step step = engine.begin_step({.learning_rate = 3e38});
          walk_step(step, model, engine, *device, stream, config_, 1);
          (void)step.finish();
          engine.drain();
        });
        EXPECT_THROW(engine.drain(), Error);  // with the same words, where the first was finish()
        (void)expect_error(ErrorCode::kPoisoned, [&] { (void)read_state(engine); });
      }
      EXPECT_NE(messages[1].find("overflow in step 1, though every gradient is finite"),
                std::string::npos)
          << messages[1];
    }
  }
}

// An update under assumed coefficients overflows, and is made again with the real ones. The blocks
// after it, which use the same place on the device, have not overflowed.
TEST_F(StreamedUpdates, WhatClippingPreventsIsNoError) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config_.optimizer.kind = OptimizerKind::kSgd;
  config_.optimizer.clip_norm = 1e-3;
  config_.memory.device_bytes = 600_KiB;
  StateBytes states[2];
  for (const OverlapPolicy policy : {OverlapPolicy::kSerial, OverlapPolicy::kSpeculative}) {
    config_.optimizer.overlap = policy;
    const auto device = make_host_device({.memory_bytes = 600_KiB, .has_own_memory = true});
    const ModelSpec model = validated(toy_model());
    Engine engine(config_, model, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    const auto updates_so_far = [] {
      return trace_counts()[static_cast<std::size_t>(TraceKind::kOnDevice)].spans;
    };
    const std::uint64_t before = updates_so_far();
    Step step = engine.begin_step({.learning_rate = 1e2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      if (unit != UnitId{3}) continue;
      auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(0));
      device->launch(stream.id(), [gradient] { gradient[3] = 0x7f00; });
    }
    const Watchdog watchdog(std::chrono::seconds(60), "no early update");
    const std::uint64_t blocks = layout_of(engine).blocks().size();
    while (policy == OverlapPolicy::kSpeculative && updates_so_far() - before < blocks)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_LT(step.finish().clip_factor, 1);
    states[policy == OverlapPolicy::kSerial ? 0 : 1] = read_state(engine);
  }
  EXPECT_TRUE(states[0] == states[1]);
}

}  // namespace
}  // namespace sluice::test
