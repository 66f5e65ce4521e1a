// An application that flushes denormal numbers or rounds another way gets the same bits from the
// engine, and finds its setting unchanged after every call.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cfenv>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/config_document.h>
#include "tests/engine/detached/detached_support.h"
#include "tests/engine/exactness_cases.h"
#include "tests/support/hostile_environment.h"
#include "tests/support/same_training.h"

namespace sluice::test {
namespace {

#define SKIP_UNKNOWN_PROCESSORS \
  if (!kKnowsEnvironment) GTEST_SKIP() << "the environment is set on x86-64 and aarch64 only"

class CallersEnvironment : public testing::TestWithParam<const char*> {};

// The thread makes device and engine, gives the values, trains and reads the state.
TEST_P(CallersEnvironment, ChangesNoBitOfTraining) {
  SKIP_UNKNOWN_PROCESSORS;
  const Case* found = std::ranges::find(kCases, std::string(GetParam()), &Case::name);
  ASSERT_NE(found, std::end(kCases));
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    const TempDirectory directory;
    Config config = toy_config(directory.path());
    config.precision = {.parameters = dtype, .gradients = dtype};
    config.optimizer.clip_norm = bound_that_bites_sometimes(2);
    if (dtype == DType::kFp32 && !config.memory.device_bytes) config.memory.device_bytes = 4_MiB;
    found->change(config);
    const ToyOptions options{
        .steps = 3, .micro_batches = 2, .evaluate = true, .has_own_memory = found->is_gpu};
    const ToyResult expected = toy_oracle(config, options);
    for (const unsigned hostile : kHostile) {
      ToyResult actual;
      EXPECT_EQ(run_under(hostile, [&] { actual = run_toy(config, options); }), hostile);
      EXPECT_TRUE(same_training(actual, expected)) << fmt::format("{:#x}", hostile);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, CallersEnvironment,
                         testing::Values("in_memory", "all_nvme", "parameters_host", "all_device"),
                         [](const auto& chosen) { return std::string(chosen.param); });

// The application changes its environment on the way, as it does when it loads a library that is
// linked with -ffast-math.
TEST(CallersEnvironmentInside, AChangeBetweenStepsChangesNoBit) {
  SKIP_UNKNOWN_PROCESSORS;
  const TempDirectory directory;
  const Config config = toy_config(directory.path());
  const ToyOptions options{.steps = 2};
  const ToyResult expected = toy_oracle(config, options);
  for (const unsigned hostile : kHostile) {
    ToyOptions changing = options;
    changing.after_step = [hostile](Engine&, std::uint64_t) { set_control(hostile); };
    ToyResult actual;
    EXPECT_EQ(run_under(kDefault, [&] { actual = run_toy(config, changing); }), hostile);
    EXPECT_TRUE(same_training(actual, expected)) << fmt::format("{:#x}", hostile);
  }
}

// A function of the application changes it within a call.
TEST(CallersEnvironmentInside, AFunctionThatChangesItChangesNoBit) {
  SKIP_UNKNOWN_PROCESSORS;
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.optimizer.clip_norm = 1;
  const ToyOptions options{.steps = 3};
  const ToyResult expected = toy_oracle(config, options);
  for (const unsigned hostile : kHostile) {
    int calls = 0;
    ToyOptions changing = options;
    changing.after_step = [&](Engine& engine, std::uint64_t) {
      engine.set_norm_group({.add = [&](std::span<std::uint64_t>) {
        ++calls;
        set_control(hostile);
      }});
    };
    const ToyResult actual = run_toy(config, changing);
    EXPECT_EQ(control(), kDefault);
    EXPECT_EQ(calls, 2);
    EXPECT_TRUE(same_training(actual, expected)) << fmt::format("{:#x}", hostile);

    const InitialValues values = [&](const TensorPlace&, std::uint64_t, std::span<float>) {
      set_control(hostile);
    };
    std::array<float, 1> room{};
    InitialSource(values).read({}, StateKind::kMaster, 0, room);
    EXPECT_EQ(control(), kDefault);
  }
}

TEST(CallersEnvironmentInside, ConfigsReadTheSameNumbers) {
  SKIP_UNKNOWN_PROCESSORS;
  const auto beta = [] {
    ConfigDocument document(R"({"optimizer": {"beta1": 0.9, "beta2": 0.95}})", "test");
    document.set("optimizer.epsilon=1.1e-7");
    const Config config = engine_config(document);
    return std::array{config.optimizer.adam.beta1, config.optimizer.adam.beta2,
                      config.optimizer.adam.epsilon};
  };
  const auto expected = beta();
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    ASSERT_EQ(std::fesetround(mode), 0);
    const auto actual = beta();
    const int after = std::fegetround();
    (void)std::fesetround(FE_TONEAREST);
    EXPECT_EQ(actual, expected);
    EXPECT_EQ(after, mode);
  }
}

class DetachedInCallersEnvironment : public DetachedTest {};

TEST_F(DetachedInCallersEnvironment, GetsTheOraclesBits) {
  SKIP_UNKNOWN_PROCESSORS;
  for (const DType dtype : {DType::kBf16, DType::kFp32}) {
    for (const unsigned hostile : kHostile) {
      make_tensors(dtype, {9000, 100});
      const Config made = config(OptimizerKind::kAdamW, TierChoice::kNvme);
      std::unique_ptr<DetachedOptimizer> optimizer;
      (void)run_under(
          hostile, [&] { optimizer = std::make_unique<DetachedOptimizer>(made, description()); });
      for (int step = 0; step < 3; ++step) {
        const std::vector updates{next(made.optimizer.kind, 0), next(made.optimizer.kind, 1)};
        EXPECT_EQ(run_under(hostile,
                            [&] {
                              optimizer->begin(updates);
                              optimizer->wait_all();
                            }),
                  hostile);
        for (const DetachedState& tensor : tensors_)
          EXPECT_EQ(tensor.parameter, tensor.oracle_parameter);
      }
    }
  }
}

}  // namespace
}  // namespace sluice::test
