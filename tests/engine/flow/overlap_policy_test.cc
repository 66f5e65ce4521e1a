// Trouble while an update overlaps with computation, under each policy: steps that are abandoned or
// skipped, buffers down to one of each kind, failures that surface a step later. And the decisions
// behind "auto".
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/plan/update_policy.h"
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

constexpr OverlapPolicy kOverlapPolicies[] = {OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                              OverlapPolicy::kEager, OverlapPolicy::kSpeculative};

class OverlapPolicyTest : public testing::TestWithParam<OverlapPolicy> {
 protected:
  OverlapPolicyTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 400_KiB;
    config_.optimizer.overlap = GetParam();
    if (GetParam() == OverlapPolicy::kEager) config_.optimizer.clip_norm = 0;
  }

  void train(Engine& engine, std::uint32_t steps) { train_on(engine, *device_, steps); }

  void train_on(Engine& engine, HostDevice& device, std::uint32_t steps) {
    const Stream stream(device, "compute");
    for (std::uint32_t i = 0; i < steps; ++i) {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      walk_step(step, model_, engine, device, stream, config_, 1);
      (void)step.finish();
    }
  }

  // `updates`: how many blocks the steps before update at least. Where the policy updates early,
  // one more is by the time when this step is abandoned.
  void abandon_step(Engine& engine, std::uint64_t updates) {
    const Stream stream(*device_, "compute");
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk_step(step, model_, engine, *device_, stream, config_, 1);
    if (updates_early(GetParam())) await_updates(updates + 1);
  }

  static bool updates_early(OverlapPolicy policy) {
    return policy == OverlapPolicy::kEager || policy == OverlapPolicy::kSpeculative;
  }

  // Since the test began.
  static std::uint64_t updates_so_far() {
    return trace_counts()[static_cast<std::size_t>(TraceKind::kAdam)].spans;
  }
  void await_updates(std::uint64_t count) const {
    const Watchdog watchdog(std::chrono::seconds(60), "no early update");
    while (updates_so_far() - updates_before_ < count)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ =
      make_host_device({.memory_bytes = 400_KiB, .copy_bytes_per_second = 0});
  const std::uint64_t updates_before_ = updates_so_far();
};

// Policies under which an update can be taken back, or has not been made yet.
class OverlapPolicyThatWaits : public OverlapPolicyTest {};

TEST_P(OverlapPolicyTest, AnAbandonedStepChangesNothingOrSaysSo) {
  // With this, "auto" is eager, and says so.
  if (GetParam() == OverlapPolicy::kEager) config_.optimizer.overlap = OverlapPolicy::kAuto;
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  train(engine, 2);
  const std::uint64_t blocks = layout_of(engine).blocks().size();
  abandon_step(engine, 2 * blocks);  // while the second update may be under way
  if (GetParam() == OverlapPolicy::kEager) {
    try {
      train(engine, 1);
      FAIL() << "blocks had been updated";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kPoisoned);
      for (const char* words :
           {"neither that of step 2 nor of step 3", "\"auto\" where nothing is clipped"})
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
    }
    return;
  }
  EXPECT_TRUE(read_state(engine) == toy_oracle(config_, {.steps = 2}).state);
  abandon_step(engine, updates_so_far() - updates_before_);  // those before are home
  train(engine, 2);
  EXPECT_TRUE(read_state(engine) == toy_oracle(config_, {.steps = 4}).state);
  EXPECT_EQ(engine.applied_step(), 4u);
}

TEST_P(OverlapPolicyThatWaits, ASkippedStepChangesNothing) {
  config_.optimizer.non_finite = NonFinitePolicy::kSkip;
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  train(engine, 1);
  engine.drain();
  const std::uint64_t updates = updates_so_far() - updates_before_;
  const Stream stream(*device_, "compute");
  const ModelSpec model = validated(model_);
  {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
    for (const UnitId unit : model.backward_order) {
      const Lease lease = step.acquire(unit, Pass::kBackward, stream);
      auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(0));
      // The very last gradient is the bad one: early updates of the rest have begun.
      if (unit == UnitId{0}) device_->launch(stream.id(), [gradient] { gradient[3] = 0x7f80; });
    }
    if (updates_early(GetParam())) await_updates(updates + 1);
    const StepReport report = step.finish();
    EXPECT_TRUE(report.skipped);
    EXPECT_EQ(report.step, 1u);
  }
  train(engine, 1);
  EXPECT_TRUE(read_state(engine) == toy_oracle(config_, {.steps = 2}).state);
}

// Weights that would overflow without the clipping, which is not known yet when a tentative update
// is made: an error only where they overflow with it.
TEST_P(OverlapPolicyThatWaits, WhatClippingPreventsIsNoError) {
  config_.optimizer.kind = OptimizerKind::kSgd;
  StateBytes states[2];
  for (const double clip_norm : {1e-3, 3e38}) {
    for (const OverlapPolicy policy : {OverlapPolicy::kSerial, GetParam()}) {
      config_.optimizer.overlap = policy;
      config_.optimizer.clip_norm = clip_norm;
      const auto device = make_host_device({.memory_bytes = 400_KiB, .copy_bytes_per_second = 0});
      Engine engine(config_, model_, *device);
      engine.initialize(toy_values());
      const Stream stream(*device, "compute");
      const ModelSpec model = validated(model_);
      const auto train_step = [&] {
        const std::uint64_t updates = updates_so_far() - updates_before_;
        Step step = engine.begin_step({.learning_rate = 1e2});
        for (const UnitId unit : model.forward_order)
          (void)step.acquire(unit, Pass::kForward, stream);
        for (const UnitId unit : model.backward_order) {
          const Lease lease = step.acquire(unit, Pass::kBackward, stream);
          if (unit != UnitId{3}) continue;
          auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(0));
          device->launch(stream.id(), [gradient] { gradient[3] = 0x7f00; });
        }
        if (updates_early(policy)) await_updates(updates + layout_of(engine).blocks().size());
        return step.finish();
      };
      if (clip_norm == 1e-3) {
        EXPECT_LT(train_step().clip_factor, 1);
        states[policy == OverlapPolicy::kSerial ? 0 : 1] = read_state(engine);
        continue;
      }
      const std::string message = expect_error(ErrorCode::kNonFinite, [&] {
        (void)train_step();
        engine.drain();
      });
      EXPECT_NE(message.find("\"h.2.ln\" (unit \"h.2\") makes its weight at element 3 overflow"),
                std::string::npos)
          << message;
    }
  }
  EXPECT_TRUE(states[0] == states[1] || GetParam() == OverlapPolicy::kSerial);
}

// One lane, and as little host memory as will do: every policy goes on, with the same bits.
TEST_P(OverlapPolicyTest, OneBufferOfEachKindIsEnough) {
  config_.optimizer.lanes = 1;
  config_.memory.host_bytes = 1_KiB;
  try {
    const Engine engine(config_, model_, *device_);
    FAIL() << "1 KiB is too little";
  } catch (const Error& error) {
    const std::string message = error.what();
    const std::string before = "the smallest that works is \"";
    const std::size_t begin = message.find(before) + before.size();
    config_.memory.host_bytes = parse_size(message.substr(begin, message.find('"', begin) - begin));
  }
  Engine engine(config_, model_, *device_);
  EXPECT_EQ(placement_of(engine).lanes.count, 1u);
  EXPECT_EQ(placement_of(engine).parameter_slots.count, 2u);
  EXPECT_TRUE(
      same_training(run_toy(engine, model_, *device_, config_, {.steps = 3, .micro_batches = 2}),
                    toy_oracle(config_, {.steps = 3, .micro_batches = 2})));
}

TEST_P(OverlapPolicyTest, LanesAreAsManyAsTheConfigSays) {
  for (const std::uint32_t lanes : {1u, 3u, 40u}) {
    config_.optimizer.lanes = lanes;
    const auto device = make_host_device({.memory_bytes = 400_KiB, .copy_bytes_per_second = 0});
    Engine engine(config_, model_, *device);
    EXPECT_EQ(placement_of(engine).lanes.count, lanes);
    EXPECT_TRUE(same_training(run_toy(engine, model_, *device, config_, {.steps = 2}),
                              toy_oracle(config_, {.steps = 2})))
        << lanes;
  }
}

// Whichever request of three steps fails, and wherever that surfaces: no hang, an error that names
// the failure, and, where the state is between two steps, a second one that says so.
TEST_P(OverlapPolicyTest, AFailedRequestEndsInAnErrorAtSomeCall) {
  std::atomic<std::uint64_t> failed = 0;
  side_by_side(seeds_of(campaign(60)), [&](std::uint64_t seed) {
    const std::uint64_t request = 64 + seed * 37 % 500;  // 64 initialize the state
    const auto device = make_host_device({.memory_bytes = 400_KiB, .copy_bytes_per_second = 0});
    Engine engine =
        EngineOverQueue::make(config_, model_, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue), {.at = request, .error = ENXIO});
        });
    engine.initialize(toy_values());
    try {
      train_on(engine, *device, 3);
      engine.drain();
    } catch (const Error& error) {
      ++failed;
      EXPECT_EQ(error.code(), ErrorCode::kIo) << error.what();
      try {
        (void)engine.begin_step({.learning_rate = 1e-2});
        ADD_FAILURE() << "the engine went on after request " << request;
      } catch (const Error& later) {
        EXPECT_TRUE(later.code() == ErrorCode::kPoisoned || later.code() == ErrorCode::kIo)
            << later.what();
      }
    }
  });
  EXPECT_GT(failed, 0u);
}

// Units homed on the device are not fetched, but computation still waits for their update: here it
// comes so late that anything else would compute with old parameters.
TEST_P(OverlapPolicyTest, UnitsOnTheDeviceWaitForTheirUpdate) {
  config_.placement = {TierChoice::kDevice, TierChoice::kNvme};
  config_.memory.device_bytes = 8_MiB;
  config_.optimizer.lanes = 1;
  const auto device = make_host_device({.memory_bytes = 8_MiB, .copy_bytes_per_second = 0});
  Engine engine =
      EngineOverQueue::make(config_, model_, *device, [](std::unique_ptr<IoQueue> queue) {
        return make_fault_queue(std::move(queue), {.seed = 5, .delay_us_max = 3000});
      });
  EXPECT_TRUE(same_training(run_toy(engine, model_, *device, config_, {.steps = 3}),
                            toy_oracle(config_, {.steps = 3})));
}

INSTANTIATE_TEST_SUITE_P(All, OverlapPolicyTest, testing::ValuesIn(kOverlapPolicies),
                         [](const auto& value) { return std::string(name_of(value.param)); });
INSTANTIATE_TEST_SUITE_P(AllButEager, OverlapPolicyThatWaits,
                         testing::Values(OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                         OverlapPolicy::kSpeculative),
                         [](const auto& value) { return std::string(name_of(value.param)); });

TEST(UpdatePolicy, AutoKeepsShadowsOnlyWhereEveryBlockHasOne) {
  for (const TierChoice parameters : {TierChoice::kNvme, TierChoice::kHost}) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.placement = {parameters, TierChoice::kNvme};
    config.optimizer.overlap = OverlapPolicy::kAuto;
    config.optimizer.clip_norm = 1;
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const Engine engine(config, toy_model(), *device);
    EXPECT_EQ(placement_of(engine).shadow_bytes != 0, parameters == TierChoice::kNvme);
  }
}

TEST(UpdatePolicy, AutoSpeculatesOnceClippingIsRare) {
  Config::Optimizer optimizer;
  optimizer.clip_norm = 1;
  UpdatePolicy policy(optimizer, /*may_be_tentative=*/true);
  for (int step = 0; step < 31; ++step) {
    EXPECT_EQ(policy.choose(), OverlapPolicy::kDeferred) << step;
    policy.note(false);
  }
  EXPECT_EQ(policy.choose(), OverlapPolicy::kSpeculative);  // one of the last 32 counts as clipped
  policy.note(false);
  policy.note(true);
  EXPECT_EQ(policy.choose(), OverlapPolicy::kSpeculative);
  policy.note(true);
  EXPECT_EQ(policy.choose(), OverlapPolicy::kDeferred);
}

TEST(UpdatePolicy, AutoIsEagerWhereNothingCanBeTakenBack) {
  Config::Optimizer optimizer;
  optimizer.clip_norm = 0;
  EXPECT_EQ(UpdatePolicy(optimizer, true).choose(), OverlapPolicy::kEager);
  optimizer.non_finite = NonFinitePolicy::kSkip;
  EXPECT_EQ(UpdatePolicy(optimizer, true).choose(), OverlapPolicy::kDeferred);
  optimizer.overlap = OverlapPolicy::kSerial;
  EXPECT_EQ(UpdatePolicy(optimizer, true).choose(), OverlapPolicy::kSerial);
}

TEST(UpdatePolicy, WithoutShadowsAutoDefers) {
  Config::Optimizer optimizer;
  UpdatePolicy policy(optimizer, /*may_be_tentative=*/false);
  for (int step = 0; step < 64; ++step) policy.note(false);
  EXPECT_EQ(policy.choose(), OverlapPolicy::kDeferred);
}

TEST(UpdatePolicy, EagerAndClippingAreRefusedTogether) {
  Config config;
  config.optimizer.overlap = OverlapPolicy::kEager;
  try {
    validate(config);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kConfig);
    EXPECT_NE(std::string(error.what()).find("clip_norm 0"), std::string::npos);
  }
  config.optimizer.clip_norm = 0;
  validate(config);
  config.optimizer.non_finite = NonFinitePolicy::kSkip;
  EXPECT_THROW(validate(config), Error);
}

// The lease on the last backward use may still be held: its unit is closed all the same.
TEST(EagerUpdates, AllowNoUseBehindTheLastThatIsStillHeld) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.optimizer.overlap = OverlapPolicy::kEager;
  config.optimizer.clip_norm = 0;
  const auto device = make_host_device({.memory_bytes = 8_MiB});
  const ModelSpec model = toy_model({}, /*leases=*/2);
  Engine engine(config, model, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  Step step = engine.begin_step({.learning_rate = 1});
  for (const UnitId unit : validated(model).forward_order)
    (void)step.acquire(unit, Pass::kForward, stream);
  (void)step.acquire(UnitId{0}, Pass::kBackward, stream);
  const Lease last = step.acquire(UnitId{5}, Pass::kBackward, stream);
  EXPECT_NE(expect_error(ErrorCode::kInvalidArgument,
                         [&] { (void)step.acquire(UnitId{5}, Pass::kBackward, stream); })
                .find("after what the schedule calls its last backward use"),
            std::string::npos);
}

}  // namespace
}  // namespace sluice::test
