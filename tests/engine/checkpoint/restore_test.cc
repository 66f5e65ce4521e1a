// A state that comes from a source: training that goes on from it has the bits of training that
// never stopped, wherever the state was and is.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <memory>

#include <fmt/format.h>

#include <sluice/units.h>
#include "tests/engine/exactness_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/memory_source.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

struct Place {
  explicit Place(const Case& placement, DType parameters) : is_gpu(placement.is_gpu) {
    config = toy_config(directory.path());
    config.precision = {.parameters = parameters, .gradients = parameters};
    if (parameters == DType::kFp32) config.memory.host_bytes = 16_MiB;
    placement.change(config);
    if (parameters == DType::kFp32 && config.memory.device_bytes) *config.memory.device_bytes *= 2;
    if (parameters == DType::kFp32 && config.memory.host_bytes < 2_MiB)
      *config.memory.host_bytes += 300_KiB;
  }

  std::unique_ptr<HostDevice> make_device() const {
    return make_host_device(
        {.memory_bytes = config.memory.device_bytes.value_or(64_MiB), .has_own_memory = is_gpu});
  }

  TempDirectory directory;
  Config config;
  bool is_gpu;
};

// The state that `before` ends in goes on in `after`, and comes to where the oracle does.
void expect_to_go_on(const Place& before, const Place& after, ToyOptions options) {
  const ModelSpec model = toy_model(options.frozen_units);
  options.steps = 5;
  const ToyResult expected = toy_oracle(before.config, options);
  const auto device = before.make_device();
  Engine engine(before.config, model, *device);
  options.steps = 2;
  const ToyResult first = run_toy(engine, model, *device, before.config, options);
  MemorySource source(engine);
  EXPECT_EQ(source.position().step, 2u);

  const auto next_device = after.make_device();
  Engine next(after.config, model, *next_device);
  options.steps = 3;
  options.source = &source;
  const ToyResult second = run_toy(next, model, *next_device, after.config, options);
  EXPECT_EQ(next.applied_step(), 5u);
  EXPECT_TRUE(second.state == expected.state);
  EXPECT_TRUE(same_sights(
      second.sights,
      {expected.sights.begin() + static_cast<long>(first.sights.size()), expected.sights.end()}));
  for (std::size_t i = 0; i < second.reports.size(); ++i) {
    EXPECT_EQ(second.reports[i].step, 3 + i);
    EXPECT_EQ(second.reports[i].gradient_norm, expected.reports[2 + i].gradient_norm);
  }
}

class Restore : public testing::TestWithParam<DType> {};

// Each placement's state goes on in one far from it in the list, under another policy.
TEST_P(Restore, GoesOnUnderAnyOtherPlacementWithTheSameBits) {
  constexpr std::size_t kCount = std::size(kCases);
  for (std::size_t i = 0; i < kCount; ++i) {
    const Case& from = kCases[i];
    const Case& to = kCases[(7 * i + 3) % kCount];
    SCOPED_TRACE(from.name + " to " + to.name);
    Place before(from, GetParam());
    Place after(to, GetParam());
    before.config.optimizer.overlap = kPolicies[i % 2].policy;
    after.config.optimizer.overlap = kPolicies[(i + 1) % 4].policy;
    const bool is_eager = after.config.optimizer.overlap == OverlapPolicy::kEager;
    before.config.optimizer.clip_norm = after.config.optimizer.clip_norm = is_eager ? 0 : 1;
    expect_to_go_on(before, after, {.evaluate = true, .frozen_units = {}});
  }
}

TEST_P(Restore, FrozenUnitsStayAsTheyAre) {
  for (const std::vector<std::uint32_t>& frozen : {std::vector<std::uint32_t>{1, 4}, {0}}) {
    const Place before(kCases[4], GetParam());
    const Place after(kCases[9], GetParam());
    expect_to_go_on(before, after, {.evaluate = true, .frozen_units = frozen});
  }
}

INSTANTIATE_TEST_SUITE_P(Precision, Restore,
                         testing::Values(DType::kBf16, DType::kFp32, DType::kFp16),
                         [](const auto& value) { return std::string(name_of(value.param)); });

TEST(RestoreOfOptimizers, MomentsThatAreNotKeptAreNotAskedFor) {
  for (const OptimizerKind kind :
       {OptimizerKind::kAdam, OptimizerKind::kLion, OptimizerKind::kAdagrad, OptimizerKind::kSgd}) {
    Place before(kCases[0], DType::kBf16);
    Place after(kCases[4], DType::kBf16);
    before.config.optimizer.kind = after.config.optimizer.kind = kind;
    expect_to_go_on(before, after, {});
  }
}

// A source gives fp32 moments, and the engine finds the codes again that mean them. bf16 holds the
// moments that were rounded to it.
class RestoreOfStates : public testing::TestWithParam<OptimizerState> {};

TEST_P(RestoreOfStates, GoesOnWithTheSameBits) {
  for (const OptimizerKind kind : {OptimizerKind::kAdamW, OptimizerKind::kSgd}) {
    for (const std::size_t to : {4u, 8u, 13u}) {
      Place before(kCases[0], DType::kBf16);
      Place after(kCases[to], DType::kBf16);
      before.config.optimizer.kind = after.config.optimizer.kind = kind;
      before.config.optimizer.state = after.config.optimizer.state = GetParam();
      expect_to_go_on(before, after, {.evaluate = true});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(States, RestoreOfStates,
                         testing::Values(OptimizerState::kBf16, OptimizerState::k8bit),
                         [](const auto& state) {
                           return "With_" + std::string(name_of(state.param));
                         });

TEST(RestoreOfShadows, VersionsOfBothCopiesGoOn) {
  for (const double clip_norm : {1.0, kNeverBites}) {
    Place before(kCases[4], DType::kBf16);
    Place after(kCases[4], DType::kBf16);
    for (Place* place : {&before, &after}) {
      place->config.optimizer.overlap = OverlapPolicy::kSpeculative;
      place->config.optimizer.clip_norm = clip_norm;
      place->config.storage.verify = Verify::kSample;
    }
    expect_to_go_on(before, after, {.evaluate = true});
  }
}

class RestoreErrors : public testing::Test {
 protected:
  Place place_{kCases[4], DType::kFp16};
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = place_.make_device();
};

TEST_F(RestoreErrors, AFailedSourceLeavesAnEngineThatTakesAnother) {
  class Failing final : public StateSource {
   public:
    StatePosition position() const override { return {.step = 9}; }
    void read(const TensorPlace&, StateKind kind, std::uint64_t, std::span<float> values) override {
      if (kind == StateKind::kExpAvgSq) throw Error(ErrorCode::kInput, "no moments here");
      std::ranges::fill(values, 1.0f);
    }
  };
  Engine engine(place_.config, model_, *device_);
  Failing failing;
  expect_error(ErrorCode::kInput, [&] { engine.restore(failing); });
  expect_error(ErrorCode::kInvalidArgument, [&] { (void)engine.position(); });
  const ToyOptions options{.steps = 2};
  EXPECT_TRUE(same_training(run_toy(engine, model_, *device_, place_.config, options),
                            toy_oracle(place_.config, options)));
  MemorySource source(engine);
  expect_error(ErrorCode::kInvalidArgument, [&] { engine.restore(source); });
}

TEST_F(RestoreErrors, ValuesThatAreNotFiniteAreNamed) {
  class Infinite final : public StateSource {
   public:
    StatePosition position() const override { return {.step = 3}; }
    void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
              std::span<float> values) override {
      std::ranges::fill(values, 1.0f);
      if (tensor.name == "h.2.fc" && kind == StateKind::kMaster && first <= 7 &&
          7 < first + values.size())
        values[7 - first] = std::numeric_limits<float>::infinity();
    }
  };
  Engine engine(place_.config, model_, *device_);
  Infinite infinite;
  const std::string message =
      expect_error(ErrorCode::kNonFinite, [&] { engine.restore(infinite); });
  EXPECT_NE(message.find("\"h.2.fc\" (unit \"h.2\") at element 7"), std::string::npos) << message;
  EXPECT_NO_THROW(engine.initialize(toy_values()));
}

// Each in the type that the optimizer keeps moments in.
TEST_F(RestoreErrors, MomentsThatCannotBeAreNamed) {
  class BadMoment final : public StateSource {
   public:
    BadMoment(StateKind kind, float value) : kind_(kind), value_(value) {}
    StatePosition position() const override { return {.step = 3}; }
    void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first,
              std::span<float> values) override {
      std::ranges::fill(values, 1.0f);
      if (tensor.name == "h.2.fc" && kind == kind_ && first <= 7 && 7 < first + values.size())
        values[7 - first] = value_;
    }

   private:
    StateKind kind_;
    float value_;
  };
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const OptimizerState state :
       {OptimizerState::kFp32, OptimizerState::kBf16, OptimizerState::k8bit}) {
    place_.config.optimizer.state = state;
    for (const auto& [kind, value] :
         {std::pair(StateKind::kExpAvg, -kInfinity), std::pair(StateKind::kExpAvg, std::nanf("")),
          std::pair(StateKind::kExpAvgSq, kInfinity), std::pair(StateKind::kExpAvgSq, -1e-6f)}) {
      const auto device = place_.make_device();
      Engine engine(place_.config, model_, *device);
      BadMoment bad(kind, value);
      const std::string message = expect_error(ErrorCode::kNonFinite, [&] { engine.restore(bad); });
      EXPECT_NE(message.find(fmt::format("the {} given for \"h.2.fc\" (unit \"h.2\") at element 7",
                                         name_of(kind))),
                std::string::npos)
          << message;
      EXPECT_NO_THROW(engine.initialize(toy_values()));
    }
  }
}

// A scale that did not move says nothing of one that does.
TEST(RestoreOfScales, AMovingLossScaleBehindAStaticOneStartsAnew) {
  const Place before(kCases[0], DType::kFp32);
  Place after(kCases[0], DType::kFp16);
  after.config.precision.loss_scale.static_scale = 0;
  const ModelSpec model = toy_model();
  const auto device = before.make_device();
  Engine engine(before.config, model, *device);
  engine.initialize(toy_values());
  MemorySource source(engine);
  EXPECT_EQ(source.position().loss_scale, std::nullopt);
  const auto next_device = after.make_device();
  Engine next(after.config, model, *next_device);
  next.restore(source);
  EXPECT_EQ(next.position().loss_scale, (LossScaleState{.scale = 65536, .hysteresis_left = 2}));
}

TEST_F(RestoreErrors, ALossScaleThatCannotBeIsRefused) {
  place_.config.precision.loss_scale.static_scale = 0;
  Engine engine(place_.config, model_, *device_);
  engine.initialize(toy_values());
  MemorySource source(engine);
  EXPECT_EQ(source.position().loss_scale,
            (LossScaleState{.scale = 65536, .hysteresis_left = 2, .good_steps = 0}));
  const auto next_device = place_.make_device();
  Engine next(place_.config, model_, *next_device);
  for (const LossScaleState& bad :
       {LossScaleState{.scale = 0}, LossScaleState{.scale = 1e300},
        LossScaleState{.scale = std::numeric_limits<double>::quiet_NaN()},
        LossScaleState{.scale = 2, .hysteresis_left = 0}}) {
    source.set_position({.step = 1, .loss_scale = bad});
    expect_error(ErrorCode::kInput, [&] { next.restore(source); });
  }
}

}  // namespace
}  // namespace sluice::test
