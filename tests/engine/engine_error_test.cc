// What an application may do wrong, and what the engine says to it.
#include <gtest/gtest.h>

#include <filesystem>

#include "base/error.h"
#include "base/units.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class EngineError : public testing::Test {
 protected:
  // The message and code of the Error that `call` throws; an empty message when it throws none.
  template <typename Call>
  std::string complaint(ErrorCode code, const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "";
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ =
      make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 0});
};

TEST_F(EngineError, StorageThatCannotBeUsedIsRefusedAtConstruction) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config_.storage.paths = {"/no/such/folder"};
  EXPECT_NE(complaint(ErrorCode::kInput, [&] { Engine engine(config_, model_, *device_); })
                .find("/no/such/folder"),
            std::string::npos);
  EXPECT_EQ(device_->allocated_bytes(), 0u);
}

TEST_F(EngineError, BudgetsThatAreTooSmallNameTheSmallestThatWorks) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config_.memory.host_bytes = 20_KiB;
  const std::string message =
      complaint(ErrorCode::kOutOfMemory, [&] { Engine engine(config_, model_, *device_); });
  const std::string before = "the smallest that works is \"";
  const std::size_t begin = message.find(before);
  ASSERT_NE(begin, std::string::npos) << message;
  const std::string size = message.substr(
      begin + before.size(), message.find('"', begin + before.size()) - begin - before.size());
  config_.memory.host_bytes = parse_size(size);
  EXPECT_TRUE(run_toy(config_, {.steps = 2}).state == toy_oracle(config_, {.steps = 2}).state);
}

TEST_F(EngineError, StateOnTheDeviceNeedsTheRestThere) {
  for (const TierChoice elsewhere : {TierChoice::kHost, TierChoice::kNvme}) {
    for (const Config::Placement& placement :
         {Config::Placement{elsewhere, TierChoice::kDevice, TierChoice::kAuto},
          Config::Placement{TierChoice::kAuto, TierChoice::kDevice, elsewhere}}) {
      config_.placement = placement;
      EXPECT_NE(complaint(ErrorCode::kConfig, [&] { Engine engine(config_, model_, *device_); })
                    .find("placement.optimizer: device updates parameters"),
                std::string::npos);
    }
  }
}

TEST_F(EngineError, BadConfigMembersAreNamed) {
  config_.optimizer.adam.beta1 = 1.0;
  EXPECT_NE(complaint(ErrorCode::kConfig, [&] { Engine engine(config_, model_, *device_); })
                .find("adam.beta1"),
            std::string::npos);
}

// Finite gradients, but an update beyond the range of fp32, or of fp16 alone: the weight is named
// under either policy, because blocks before it may be updated already.
TEST_F(EngineError, WeightsThatOverflowAreNamed) {
  for (const NonFinitePolicy policy : {NonFinitePolicy::kStop, NonFinitePolicy::kSkip}) {
    for (const TierChoice tier : {TierChoice::kDevice, TierChoice::kHost, TierChoice::kNvme}) {
      for (const DType dtype : {DType::kBf16, DType::kFp16}) {
        config_.optimizer.non_finite = policy;
        config_.placement = {tier, tier};
        config_.precision.parameters = dtype;
        const double rate = dtype == DType::kFp16 ? 1e5 : 3e38;
        const std::string message = complaint(ErrorCode::kNonFinite, [&] {
          (void)run_toy(config_, {.steps = 1, .learning_rate = rate});
        });
        EXPECT_NE(message.find(toy_model().units[0].tensors[0].name), std::string::npos) << message;
        EXPECT_NE(message.find("at element 0 overflow in step 1"), std::string::npos) << message;
      }
    }
  }
}

TEST_F(EngineError, StepsNeedInitialValuesAndComeOneAtATime) {
  Engine engine(config_, model_, *device_);
  EXPECT_NE(
      complaint(ErrorCode::kInvalidArgument, [&] { (void)engine.begin_step({.learning_rate = 1}); })
          .find("initialize()"),
      std::string::npos);
  engine.initialize(toy_values());
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument, [&] { engine.initialize(toy_values()); }), "");
  const Step step = engine.begin_step({.learning_rate = 1});
  EXPECT_NE(
      complaint(ErrorCode::kInvalidArgument, [&] { (void)engine.begin_step({.learning_rate = 1}); })
          .find("still active"),
      std::string::npos);
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument, [&] { (void)engine.begin_inference(); }), "");
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument, [&] { (void)read_state(engine); }), "");
}

TEST_F(EngineError, BadStepOptionsAreNamed) {
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument,
                      [&] { (void)engine.begin_step({.learning_rate = -1}); }),
            "");
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument,
                      [&] { (void)engine.begin_step({.learning_rate = NAN}); }),
            "");
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument,
                      [&] { (void)engine.begin_step({.learning_rate = 1, .micro_batches = 0}); }),
            "");
}

TEST_F(EngineError, AcquiringWhatIsNotThereIsAnError) {
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const Stream stream(*device_, "compute");
  Step step = engine.begin_step({.learning_rate = 1});
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument,
                      [&] { (void)step.acquire(UnitId{99}, Pass::kForward, stream); })
                .find("unit 99 does not exist; the model has 6"),
            std::string::npos);
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument,
                      [&] { (void)step.acquire(UnitId{0}, Pass::kInference, stream); })
                .find("pass \"inference\" does not belong to a training step"),
            std::string::npos);
  const Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream);
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument, [&] { (void)step.finish(); })
                .find("1 leases are held"),
            std::string::npos);
}

TEST_F(EngineError, MoreLeasesThanDeclaredAreAnErrorAndNotAWait) {
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const Stream stream(*device_, "compute");
  Step step = engine.begin_step({.learning_rate = 1});
  Lease first = step.acquire(UnitId{0}, Pass::kForward, stream);
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument,
                      [&] { (void)step.acquire(UnitId{1}, Pass::kForward, stream); })
                .find("concurrent_leases is 1"),
            std::string::npos);
  first.release();
  EXPECT_NO_THROW((void)step.acquire(UnitId{1}, Pass::kForward, stream));
}

TEST_F(EngineError, TwoLeasesAtOnceWhenDeclared) {
  model_.concurrent_leases = 2;
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config_.memory.device_bytes = 400_KiB;
  device_ = make_host_device({.memory_bytes = 400_KiB, .copy_bytes_per_second = 0});
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const Stream stream(*device_, "compute");
  Inference inference = engine.begin_inference();
  std::optional<Lease> held;
  for (const UnitId unit : validated(model_).forward_order) {
    Lease next = inference.acquire(unit, stream);
    held = std::move(next);  // the one before is released only now
  }
  held.reset();
}

TEST_F(EngineError, AnAbandonedStepChangesNothing) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const StateBytes before = read_state(engine);
  const Stream stream(*device_, "compute");
  {
    Step step = engine.begin_step({.learning_rate = 1});
    for (std::uint32_t unit = 0; unit < 3; ++unit)
      (void)step.acquire(UnitId{unit}, Pass::kForward, stream);
  }
  {
    Step step = engine.begin_step({.learning_rate = 1});
    walk_step(step, model_, engine, *device_, stream, config_, 1);  // all of it, but no finish()
  }
  EXPECT_EQ(engine.applied_step(), 0u);
  EXPECT_TRUE(read_state(engine) == before);
}

TEST_F(EngineError, NonFiniteGradientsStopOrSkipWithTheStateUnchanged) {
  for (const NonFinitePolicy policy : {NonFinitePolicy::kStop, NonFinitePolicy::kSkip}) {
    config_.optimizer.non_finite = policy;
    const auto device = make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 0});
    Engine engine(config_, model_, *device);
    engine.initialize(toy_values());
    const StateBytes before = read_state(engine);
    const Stream stream(*device, "compute");
    const ModelSpec model = validated(model_);
    {
      Step step = engine.begin_step({.learning_rate = 1});
      for (const UnitId unit : model.forward_order)
        (void)step.acquire(unit, Pass::kForward, stream);
      for (const UnitId unit : model.backward_order) {
        const Lease lease = step.acquire(unit, Pass::kBackward, stream);
        if (unit != UnitId{2}) continue;
        auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(1));
        device->launch(stream.id(), [gradient] { gradient[77] = 0x7fc0; });
      }
      if (policy == NonFinitePolicy::kStop) {
        EXPECT_NE(complaint(ErrorCode::kNonFinite, [&] { (void)step.finish(); })
                      .find("the gradient of \"h.1.fc\" (unit \"h.1\") is not finite at element 77 "
                            "in step 1"),
                  std::string::npos);
      } else {
        const StepReport report = step.finish();
        EXPECT_TRUE(report.skipped);
        EXPECT_EQ(report.step, 0u);
      }
    }
    EXPECT_EQ(engine.applied_step(), 0u);
    EXPECT_TRUE(read_state(engine) == before);
    Step next = engine.begin_step({.learning_rate = 1});  // the engine goes on
    walk_step(next, model_, engine, *device, stream, config_, 1);
    EXPECT_EQ(next.finish().step, 1u);
  }
}

// As with a failed CUDA context, the device stays failed; the step ends without a hang and without
// an update.
TEST_F(EngineError, AnExceptionInComputationReachesTheApplicationAndUpdatesNothing) {
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const StateBytes before = read_state(engine);
  const Stream stream(*device_, "compute");
  {
    Step step = engine.begin_step({.learning_rate = 1});
    device_->launch(stream.id(), [] { throw std::runtime_error("out of cheese"); });
    walk_step(step, model_, engine, *device_, stream, config_, 1);
    EXPECT_THROW((void)step.finish(), std::runtime_error);
  }
  EXPECT_EQ(engine.applied_step(), 0u);
  EXPECT_TRUE(read_state(engine) == before);
}

}  // namespace
}  // namespace sluice::test
