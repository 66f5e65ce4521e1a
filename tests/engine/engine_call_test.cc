// Calls that an application gets wrong: each throws an Error that names the object, the numbers and
// the remedy, and leaves the engine able to go on.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <optional>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "tests/support/delays.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class EngineCall : public testing::Test {
 protected:
  EngineCall() { engine_.initialize(toy_values()); }

  // Every one of `words` is in the message of the kInvalidArgument that `call` throws.
  template <typename Call>
  void expect_refused(std::initializer_list<std::string_view> words, const Call& call) {
    const std::string message = expect_error(ErrorCode::kInvalidArgument, call);
    for (const std::string_view word : words)
      EXPECT_NE(message.find(word), std::string::npos)
          << '"' << word << "\" is not in: " << message;
  }

  // The engine has not been harmed.
  void train_a_step() {
    Step step = engine_.begin_step({.learning_rate = 1});
    walk_step(step, model_, engine_, *device_, stream_, config_, 1);
    const std::uint64_t number = step.number();
    EXPECT_EQ(step.finish().step, number);
    engine_.drain();
    EXPECT_EQ(engine_.applied_step(), number);
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model({2});  // h.1 is frozen
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Engine engine_{config_, model_, *device_};
  Stream stream_{*device_, "compute"};
  std::vector<std::byte> bytes_ = std::vector<std::byte>(1_MiB);
};

TEST_F(EngineCall, ATensorThatDoesNotExist) {
  for (const std::uint32_t id : {15u, 99u, ~0u}) {
    expect_refused({"tensor " + std::to_string(id) + " does not exist", "the model has 15"}, [&] {
      engine_.read_state(TensorId{id}, StateKind::kMaster, 0, std::span(bytes_).first(4));
    });
    EXPECT_THROW((void)layout_of(engine_).tensor(TensorId{id}), Error);
  }
  EXPECT_THROW((void)layout_of(engine_).unit(UnitId{6}), Error);
  EXPECT_THROW((void)layout_of(engine_).tensors_of(UnitId{6}), Error);
  EXPECT_THROW((void)layout_of(engine_).blocks_of(UnitId{6}), Error);
  EXPECT_THROW((void)layout_of(engine_).block(BlockId{12345}), Error);
  train_a_step();
}

TEST_F(EngineCall, AReadThatDoesNotFitItsTensor) {
  const auto read = [this](std::uint64_t first, std::uint64_t size_bytes) {
    engine_.read_state(TensorId{0}, StateKind::kMaster, first, std::span(bytes_).first(size_bytes));
  };
  read(12609, 4);
  expect_refused({"\"wte\"", "12609", "2", "12610"}, [&] { read(12609, 8); });
  expect_refused({"\"wte\"", "12611", "12610"}, [&] { read(12611, 0); });
  expect_refused({"\"wte\"", "12610"}, [&] { read(std::numeric_limits<std::uint64_t>::max(), 8); });
  expect_refused({"\"wte\"", "7 B", "4 B"}, [&] { read(0, 7); });
  train_a_step();
}

TEST_F(EngineCall, AMomentOfAFrozenTensor) {
  const TensorId frozen = layout_of(engine_).tensors_of(UnitId{2})[1].id;
  for (const StateKind kind : {StateKind::kExpAvg, StateKind::kExpAvgSq})
    expect_refused({"\"h.1.fc\"", "frozen", "\"h.1\""},
                   [&] { engine_.read_state(frozen, kind, 0, std::span(bytes_).first(4)); });
  EXPECT_NO_THROW(engine_.read_state(frozen, StateKind::kMaster, 0, std::span(bytes_).first(4)));
}

TEST_F(EngineCall, AStateOfNoKind) {
  expect_refused({"StateKind", "9"}, [&] {
    engine_.read_state(TensorId{0}, StateKind{9}, 0, std::span(bytes_).first(4));
  });
}

TEST_F(EngineCall, ATensorThatTheLeaseDoesNotHave) {
  Step step = engine_.begin_step({.learning_rate = 1});
  const Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream_);
  expect_refused({"unit \"embedding\"", "tensor 2", "has 2"}, [&] { (void)lease.parameter(2); });
  expect_refused({"unit \"embedding\"", "Pass::kBackward"}, [&] { (void)lease.gradient(0); });
}

// The elements are what the caller takes them for, or nothing is handed out.
TEST_F(EngineCall, AnotherElementType) {
  Step step = engine_.begin_step({.learning_rate = 1});
  const Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream_);
  expect_refused({"parameter", "fp32", "precision.parameters is bf16"},
                 [&] { (void)lease.parameter<float>(0); });
  expect_refused({"parameter", "fp16"}, [&] { (void)lease.parameter<Fp16>(0); });
  expect_refused({"gradient", "fp32", "precision.gradients is bf16"},
                 [&] { (void)lease.gradient<float>(0); });
  EXPECT_EQ(static_cast<const void*>(lease.parameter<Bf16>(0)), lease.parameter(0));
}

TEST_F(EngineCall, ATensorByName) {
  Step step = engine_.begin_step({.learning_rate = 1});
  const Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream_);
  const UnitSpec& unit = model_.units[0];
  for (std::size_t i = 0; i < unit.tensors.size(); ++i)
    EXPECT_EQ(lease.tensor(unit.tensors[i].name), i);
  expect_refused({"tensor", "\"none\"", unit.name.c_str(), unit.tensors[0].name.c_str()},
                 [&] { (void)lease.tensor("none"); });
}

TEST_F(EngineCall, UnitsAndTensorsByName) {
  const UnitSpec& unit = model_.units[1];
  EXPECT_EQ(engine_.unit(unit.name), UnitId{1});
  const TensorId first{static_cast<std::uint32_t>(model_.units[0].tensors.size())};
  EXPECT_EQ(engine_.tensor(unit.tensors[0].name), first);
  expect_refused({"unit", "none"}, [&] { (void)engine_.unit("none"); });
  expect_refused({"tensor", "none"}, [&] { (void)engine_.tensor("none"); });
}

TEST(StepReportText, SaysWhatAStepDid) {
  StepReport report;
  report.step = 7;
  report.gradient_norm = 2;
  report.clip_factor = 0.5;
  report.nvme_read_bytes = 3 << 20;
  report.times.total_ns = 4'000'000;
  report.times.compute_ns = 3'000'000;
  report.times.exposed_io_ns = 1'000'000;
  report.times.work.any_ns = 2'000'000;
  EXPECT_EQ(
      to_string(report),
      "step 7: norm 2, 4.000 ms (compute 75 %, I/O 25 %, optimizer 0 %, other 0 %), read 3.00 "
      "MiB, written 0 B, 50 % hidden, clipped by 0.5");
}

TEST_F(EngineCall, AGradientThatThereIsNot) {
  Step step = engine_.begin_step({.learning_rate = 1});
  for (const UnitId unit : validated(model_).forward_order)
    (void)step.acquire(unit, Pass::kForward, stream_);
  for (const UnitId unit : validated(model_).backward_order) {
    const Lease lease = step.acquire(unit, Pass::kBackward, stream_);
    if (unit == UnitId{2}) {
      expect_refused({"unit \"h.1\"", "frozen"}, [&] { (void)lease.gradient(0); });
    } else {
      expect_refused({"tensor 3"}, [&] { (void)lease.gradient(3); });
    }
  }
  EXPECT_EQ(step.finish().step, 1u);
}

TEST_F(EngineCall, ALeaseThatHasEnded) {
  Step step = engine_.begin_step({.learning_rate = 1});
  Lease lease = step.acquire(UnitId{0}, Pass::kForward, stream_);
  lease.release();
  lease.release();
  expect_refused({"unit \"embedding\"", "released"}, [&] { (void)lease.parameter(0); });
  expect_refused({"unit \"embedding\"", "released"}, [&] { (void)lease.gradient(0); });
  expect_refused({"released"}, [&] { (void)lease.parameter<Bf16>(0); });
  expect_refused({"released"}, [&] { (void)lease.gradient<Bf16>(0); });
}

TEST_F(EngineCall, AStepThatIsOver) {
  std::optional<Step> step(engine_.begin_step({.learning_rate = 1}));
  walk_step(*step, model_, engine_, *device_, stream_, config_, 1);
  (void)step->finish();
  expect_refused({"finish", "begin_step()"}, [&] { (void)step->finish(); });
  expect_refused({"acquire", "begin_step()"},
                 [&] { (void)step->acquire(UnitId{0}, Pass::kForward, stream_); });
  expect_refused({"save"}, [&] { (void)step->save({}, stream_); });
  expect_refused({"load"}, [&] { (void)step->load({}, stream_); });
  expect_refused({"loss_scale"}, [&] { (void)step->loss_scale(); });
  expect_refused({"number"}, [&] { (void)step->number(); });
  step.reset();
  train_a_step();
}

TEST_F(EngineCall, AnInferenceThatIsOver) {
  Inference inference = engine_.begin_inference();
  const Inference moved = std::move(inference);
  expect_refused({"acquire", "begin_inference()"},
                 [&] { (void)inference.acquire(UnitId{0}, stream_); });
  expect_refused({"save"}, [&] { (void)inference.save({}, stream_); });
  expect_refused({"load"}, [&] { (void)inference.load({}, stream_); });
}

TEST_F(EngineCall, AStepWithoutMicroBatches) {
  expect_refused({"predicted_traffic", "micro_batches is 0"},
                 [&] { (void)engine_.predicted_traffic(0); });
  expect_refused({"begin_step", "micro_batches is 0"},
                 [&] { (void)engine_.begin_step({.learning_rate = 1, .micro_batches = 0}); });
  train_a_step();
}

TEST_F(EngineCall, ValuesThatNobodyGives) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  Engine engine(config_, model_, *device);
  expect_refused({"initialize", "function"}, [&] { engine.initialize({}); });
  EXPECT_NO_THROW(engine.initialize(toy_values()));
}

// Close() is the last call: it brings what the last update has come to.
TEST_F(EngineCall, NothingAfterClose) {
  {
    const Step step = engine_.begin_step({.learning_rate = 1});
    expect_refused({"close", "still active"}, [&] { engine_.close(); });
  }
  {
    const Inference inference = engine_.begin_inference();
    expect_refused({"close", "still active"}, [&] { engine_.close(); });
  }
  train_a_step();
  engine_.close();
  engine_.close();
  expect_refused({"begin_step", "closed"}, [&] { (void)engine_.begin_step({.learning_rate = 1}); });
  expect_refused({"begin_inference", "closed"}, [&] { (void)engine_.begin_inference(); });
  expect_refused({"read_state", "closed"}, [&] {
    engine_.read_state(TensorId{0}, StateKind::kMaster, 0, std::span(bytes_).first(4));
  });
  EXPECT_EQ(engine_.applied_step(), 1u);
}

// All uses of a step whose gradients have an infinite element.
void walk_infinitely(Step& step, const ModelSpec& model, HostDevice& device, const Stream& stream) {
  for (const UnitId unit : model.forward_order) (void)step.acquire(unit, Pass::kForward, stream);
  for (const UnitId unit : model.backward_order) {
    const Lease lease = step.acquire(unit, Pass::kBackward, stream);
    auto* gradient = reinterpret_cast<std::uint16_t*>(lease.gradient(0));
    device.launch(stream.id(), [gradient] { gradient[0] = 0x7f80; });
  }
}

class FailedFinish : public testing::Test {
 protected:
  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = validated(toy_model());
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  Watchdog watchdog_{std::chrono::minutes(1), "a second finish() hangs"};
};

TEST_F(FailedFinish, FailsAgainWhereTheLossScaleIsAtItsMinimum) {
  config_.optimizer.non_finite = NonFinitePolicy::kSkip;
  config_.precision.loss_scale = {
      .static_scale = 0, .initial_scale_power = 0, .hysteresis = 1, .minimum = 1};
  Engine engine(config_, model_, *device_);
  engine.initialize(toy_values());
  const StateBytes before = read_state(engine);
  const Stream stream(*device_, "compute");
  {
    Step step = engine.begin_step({.learning_rate = 1});
    walk_infinitely(step, model_, *device_, stream);
    for (int i = 0; i < 2; ++i) {
      const std::string message = expect_error(ErrorCode::kNonFinite, [&] { (void)step.finish(); });
      EXPECT_NE(message.find("at its minimum of 1"), std::string::npos) << message;
    }
  }
  EXPECT_TRUE(read_state(engine) == before);
  Step next = engine.begin_step({.learning_rate = 1});
  walk_step(next, model_, engine, *device_, stream, config_, 1);
  EXPECT_EQ(next.finish().step, 1u);
}

TEST_F(FailedFinish, TakesNoMoreUses) {
  for (const OverlapPolicy policy : {OverlapPolicy::kDeferred, OverlapPolicy::kSerial}) {
    config_.optimizer.overlap = policy;
    Engine engine(config_, model_, *device_);
    engine.initialize(toy_values());
    const StateBytes before = read_state(engine);
    const Stream stream(*device_, "compute");
    {
      Step step = engine.begin_step({.learning_rate = 1});
      walk_infinitely(step, model_, *device_, stream);
      for (int i = 0; i < 2; ++i) {
        (void)expect_error(ErrorCode::kNonFinite, [&] { (void)step.finish(); });
        for (const bool announces : {false, true}) {
          const std::string message = expect_error(ErrorCode::kInvalidArgument, [&] {
            if (announces)
              (void)step.announce(std::vector{UnitId{0}}, Pass::kBackward);
            else
              (void)step.acquire(UnitId{0}, Pass::kBackward, stream);
          });
          EXPECT_NE(message.find("finish() has ended the step behind"), std::string::npos)
              << message;
        }
      }
    }
    EXPECT_TRUE(read_state(engine) == before);
    Step next = engine.begin_step({.learning_rate = 1});
    walk_step(next, model_, engine, *device_, stream, config_, 1);
    EXPECT_EQ(next.finish().step, 1u);
  }
}

}  // namespace
}  // namespace sluice::test
