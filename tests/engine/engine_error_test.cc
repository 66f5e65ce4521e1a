// Mistakes of an application, and the engine's answers.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tests/support/same_training.h"
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
  EXPECT_TRUE(same_training(run_toy(config_, {.steps = 2}), toy_oracle(config_, {.steps = 2})));
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

// A gradient whose square is beyond fp32: the weight would never move again, without a word.
TEST_F(EngineError, MomentsThatOverflowAreNamed) {
  for (const TierChoice tier : {TierChoice::kDevice, TierChoice::kHost, TierChoice::kNvme}) {
    for (const double clip_norm : {0.0, 1.0}) {
      config_.placement = {tier, tier};
      config_.optimizer.clip_norm = clip_norm;
      const auto device =
          make_host_device({.memory_bytes = 64_MiB, .has_own_memory = tier == TierChoice::kDevice});
      Engine engine(config_, model_, *device);
      engine.initialize(toy_values());
      const Stream stream(*device, "compute");
      const auto train = [&] {
        Step step = engine.begin_step({.learning_rate = 1e-3});
        for (const UnitId unit : validated(model_).forward_order)
          (void)step.acquire(unit, Pass::kForward, stream);
        for (const UnitId unit : validated(model_).backward_order) {
          const Lease lease = step.acquire(unit, Pass::kBackward, stream);
          if (unit != UnitId{2}) continue;
          auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(1));
          device->launch(stream.id(), [gradient] { gradient[77] = bf16_from_float(3e38f); });
        }
        (void)step.finish();
        engine.close();
      };
      if (clip_norm != 0) {
        EXPECT_NO_THROW(train());
        continue;
      }
      const std::string message = complaint(ErrorCode::kNonFinite, train);
      EXPECT_NE(message.find("\"h.1.fc\" (unit \"h.1\") makes its exp_avg_sq at element 77 "
                             "overflow in step 1"),
                std::string::npos)
          << message;
      EXPECT_NE(message.find("optimizer.clip_norm"), std::string::npos) << message;
    }
  }
}

// Found at once, not blamed on the learning rate one step later; and the engine can be given
// others.
TEST_F(EngineError, InitialValuesThatAreNotFiniteAreNamed) {
  for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    config_.precision = {.parameters = dtype, .gradients = DType::kFp32};
    const float beyond = dtype == DType::kFp16 ? 7e4f : dtype == DType::kBf16 ? 3.4e38f : INFINITY;
    Engine engine(config_, model_, *device_);
    for (const float value : {beyond, -beyond, std::nanf("")}) {
      const std::string message = complaint(ErrorCode::kNonFinite, [&] {
        engine.initialize(
            [&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
              toy_values()(tensor, first, values);
              if (tensor.name == "h.3.fc" && first <= 5000 && 5000 < first + values.size())
                values[5000 - first] = value;
            });
      });
      EXPECT_NE(message.find("\"h.3.fc\" (unit \"h.3\") at element 5000"), std::string::npos)
          << message;
    }
    EXPECT_TRUE(run_toy(engine, model_, *device_, config_, {.steps = 1}).state ==
                toy_oracle(config_, {.steps = 1}).state);
  }
}

// A mask of minus infinity is what an application may want: a frozen unit is never updated.
TEST_F(EngineError, FrozenUnitsMayHoldInfinity) {
  model_.units.front().is_frozen = true;
  Engine engine(config_, model_, *device_);
  engine.initialize([&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
    toy_values()(tensor, first, values);
    if (index_of(tensor.unit) == 0) std::ranges::fill(values, -INFINITY);
  });
  std::vector<float> values(4);
  engine.read_state(TensorId{0}, StateKind::kMaster, 0, std::as_writable_bytes(std::span(values)));
  EXPECT_EQ(values, std::vector<float>(4, -INFINITY));
}

// Nothing wants a value that is no number, or one that its type would make infinite.
TEST_F(EngineError, ValuesOfFrozenUnitsThatAreNoNumbersAreNamed) {
  model_.units.front().is_frozen = true;
  for (const DType dtype : {DType::kFp32, DType::kBf16, DType::kFp16}) {
    config_.precision = {.parameters = dtype, .gradients = DType::kFp32};
    const float large = dtype == DType::kFp16 ? 7e4f : dtype == DType::kBf16 ? 3.4e38f : NAN;
    for (const float value : {large, -large, std::nanf("")}) {
      Engine engine(config_, model_, *device_);
      const std::string message = complaint(ErrorCode::kNonFinite, [&] {
        engine.initialize(
            [&](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
              toy_values()(tensor, first, values);
              if (tensor.id == TensorId{0} && first == 0) values[3] = value;
            });
      });
      EXPECT_NE(message.find("\"" + model_.units.front().name + "\") at element 3 is"),
                std::string::npos)
          << message;
    }
  }
}

TEST_F(EngineError, NumbersThatFp32CannotHoldAreRefused) {
  for (const double epsilon : {0.0, 1e-46, 1e-39}) {
    Config config = config_;
    config.optimizer.adam.epsilon = epsilon;
    EXPECT_NE(complaint(ErrorCode::kConfig, [&] { Engine engine(config, model_, *device_); })
                  .find("optimizer.adam.epsilon"),
              std::string::npos)
        << epsilon;
  }
  for (const double scale : {0x1p126, 0x1p65, 0x1p-65, 0x1p-100, -1.0, 1e39}) {
    Config config = config_;
    config.precision.loss_scale.static_scale = scale;
    EXPECT_NE(complaint(ErrorCode::kConfig, [&] { Engine engine(config, model_, *device_); })
                  .find("precision.loss_scale.static"),
              std::string::npos)
        << scale;
  }
  config_.optimizer.adam.epsilon = 1.2e-38;
  for (const double scale : {0x1p64, 0x1p-64}) {
    config_.precision.loss_scale.static_scale = scale;
    EXPECT_NO_THROW(Engine(config_, model_, *device_));
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
  const std::string order = complaint(ErrorCode::kInvalidArgument, [&] {
    (void)engine.begin_step({.learning_rate = 1, .order = MicroBatchOrder{2}});
  });
  EXPECT_NE(order.find("MicroBatchOrder 2 does not exist"), std::string::npos) << order;
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

TEST_F(EngineError, NumbersOfAStepThatCannotBe) {
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const auto refused = [&](const StepOptions& options, const char* words) {
    EXPECT_NE(complaint(ErrorCode::kInvalidArgument, [&] { (void)engine.begin_step(options); })
                  .find(words),
              std::string::npos);
  };
  refused({.learning_rate = 1, .micro_batches = 65537}, "65537; a step has at most 65536");
  refused({.learning_rate = 1, .gradient_divisor = 1e-40}, "its inverse must be a normal number");
  EXPECT_NE(
      complaint(ErrorCode::kInvalidArgument, [&] { (void)engine.predicted_traffic(4'000'000'000); })
          .find("at most 65536"),
      std::string::npos);
  const Stream stream(*device_, "compute");
  Step step = engine.begin_step({.learning_rate = 1});
  EXPECT_NE(complaint(ErrorCode::kInvalidArgument,
                      [&] { (void)step.acquire(UnitId{0}, static_cast<Pass>(7), stream); })
                .find("there is no pass 7"),
            std::string::npos);
}

TEST_F(EngineError, TwoLeasesAtOnceWhenDeclared) {
  model_.concurrent_leases = 2;
  config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config_.memory.device_bytes = 400_KiB;
  device_ = make_host_device({.memory_bytes = 400_KiB, .copy_bytes_per_second = 0});
  Engine engine(config_, model_, *device_);
  const ToyOptions options{.steps = 2, .evaluate = true};
  EXPECT_TRUE(same_training(run_toy(engine, model_, *device_, config_, options),
                            toy_oracle(config_, options)));
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
