// The options of finish(): learning rates and the gradient's divisor. A rate that is set there
// gives the bits of one that begin_step() had, under every policy; and steps may be driven by one
// thread after another.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include <sluice/units.h>

#include "cpu_optim/rank_sum.h"
#include "engine/engine_access.h"
#include "engine/plan/placement.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/engine/ranks/sharding_cases.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class FinishOptionsTest : public testing::TestWithParam<OverlapPolicy> {
 protected:
  FinishOptionsTest() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.memory.device_bytes = 400_KiB;
    config_.optimizer.overlap = GetParam();
    config_.optimizer.groups = {{.tensors = {"wte"}, .learning_rate_factor = 0.5},
                                {.tensors = {"*.fc"}, .learning_rate_factor = 2}};
    // Without clipping, a divisor shows in the state, and speculation is right.
    config_.optimizer.clip_norm = GetParam() == OverlapPolicy::kEager ? 0 : 1e6;
  }

  struct Run {
    StateBytes state;
    std::vector<double> norms;
  };

  // Steps of `walked` micro-batches.
  Run train(const StepOptions& begin, const FinishOptions& finish, std::uint32_t walked = 1,
            int steps = 3) {
    const auto device = make_host_device({.memory_bytes = 400_KiB});
    Engine engine(config_, model_, *device);
    engine.initialize(toy_values());
    const Stream stream(*device, "compute");
    Run run;
    for (int i = 0; i < steps; ++i) {
      Step step = engine.begin_step(begin);
      walk_step(step, model_, engine, *device, stream, config_, walked);
      run.norms.push_back(step.finish(finish).gradient_norm);
    }
    engine.drain();
    run.state = read_state(engine);
    engine.close();
    return run;
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
};

class FinishOptionsThatMayDiffer : public FinishOptionsTest {};

TEST_P(FinishOptionsThatMayDiffer, ARateGivenLateGivesTheSameBits) {
  const Run expected = train({.learning_rate = 1e-3}, {});
  EXPECT_EQ(train({.learning_rate = 7}, {.learning_rate = 1e-3}).state, expected.state);
  EXPECT_NE(train({.learning_rate = 7}, {}).state, expected.state);
}

TEST_P(FinishOptionsThatMayDiffer, RatesOfGroupsTakeThePlaceOfFactors) {
  const Run expected = train({.learning_rate = 1e-3}, {});
  const std::vector<double> rates{0.5e-3, 2e-3};
  EXPECT_EQ(train({.learning_rate = 1e-3}, {.group_learning_rates = rates}).state, expected.state);
  EXPECT_EQ(train({.learning_rate = 1e-3, .group_learning_rates = rates}, {}).state,
            expected.state);
  EXPECT_NE(train({.learning_rate = 1e-3}, {.group_learning_rates = {{1e-3, 2e-3}}}).state,
            expected.state);
}

// An application that does not know beforehand how many micro-batches a step will have.
TEST_P(FinishOptionsThatMayDiffer, ADivisorGivenLateGivesTheSameBits) {
  const Run mean = train({.learning_rate = 1e-3, .micro_batches = 2}, {}, 2);
  const Run late = train({.learning_rate = 1e-3}, {.gradient_divisor = 2}, 2);
  EXPECT_EQ(late.state, mean.state);
  EXPECT_EQ(late.norms, mean.norms);
  const Run sum = train({.learning_rate = 1e-3}, {.gradient_divisor = 1}, 2);
  EXPECT_EQ(sum.norms[0], 2 * mean.norms[0]);
}

INSTANTIATE_TEST_SUITE_P(Policies, FinishOptionsThatMayDiffer,
                         testing::Values(OverlapPolicy::kSerial, OverlapPolicy::kDeferred,
                                         OverlapPolicy::kSpeculative),
                         [](const auto& policy) { return std::string(name_of(policy.param)); });

using FinishOptionsCheck = FinishOptionsTest;

TEST_P(FinishOptionsCheck, OptionsThatCannotBe) {
  const auto device = make_host_device({.memory_bytes = 400_KiB});
  Engine engine(config_, model_, *device);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  const auto refuse = [](const auto& call, std::string_view word) {
    const std::string message = expect_error(ErrorCode::kInvalidArgument, call);
    EXPECT_NE(message.find(word), std::string::npos) << message;
  };
  refuse([&] { (void)engine.begin_step({.learning_rate = 1, .gradient_divisor = 0}); },
         "begin_step: gradient_divisor is 0");
  refuse([&] { (void)engine.begin_step({.learning_rate = 1, .gradient_divisor = 1e46}); },
         "begin_step: gradient_divisor is 1e+46");
  refuse([&] { (void)engine.begin_step({.learning_rate = 1, .group_learning_rates = {1}}); },
         "group_learning_rates has 1 entries, but optimizer.groups has 2");
  Step step = engine.begin_step({.learning_rate = 1e-3});
  refuse([&] { (void)engine.begin_step({.learning_rate = 5}); }, "still active");
  walk_step(step, model_, engine, *device, stream, config_, 1);
  refuse([&] { (void)step.finish({.learning_rate = -1}); }, "finish: learning_rate is -1");
  refuse([&] { (void)step.finish({.gradient_divisor = -2}); }, "gradient_divisor is -2");
  refuse(
      [&] {
        (void)step.finish({.group_learning_rates = {{1, -1}}});
      },
      "group_learning_rates[1] is -1");
  if (GetParam() == OverlapPolicy::kEager) {
    refuse([&] { (void)step.finish({.learning_rate = 2e-3}); }, "\"auto\" is eager");
    refuse([&] { (void)step.finish({.gradient_divisor = 2}); }, "\"eager\"");
  }
  // None of it has changed anything.
  EXPECT_EQ(step.finish({.gradient_divisor = 1}).step, 1u);
  engine.drain();
  const StateBytes state = read_state(engine);
  engine.close();

  EXPECT_EQ(state, train({.learning_rate = 1e-3}, {}, 1, 1).state);
}

TEST_P(FinishOptionsCheck, AFactorOfZeroIsRefused) {
  if (GetParam() == OverlapPolicy::kEager) return;  // does not clip
  config_.optimizer.clip_norm = 1e-60;
  const auto device = make_host_device({.memory_bytes = 400_KiB});
  Engine engine(config_, model_, *device);
  engine.initialize(toy_values());
  const StateBytes before = read_state(engine);
  const Stream stream(*device, "compute");
  {
    Step step = engine.begin_step({.learning_rate = 1e-3});
    walk_step(step, model_, engine, *device, stream, config_, 1);
    const std::string message =
        expect_error(ErrorCode::kInvalidArgument, [&] { (void)step.finish(); });
    EXPECT_NE(message.find("optimizer.clip_norm 1e-60"), std::string::npos) << message;
  }
  EXPECT_EQ(read_state(engine), before);
}

// One thread at a time, but not always the same one: what a framework's engine of gradients does.
TEST_P(FinishOptionsCheck, EachCallFromAThreadOfItsOwn) {
  const Run expected = train({.learning_rate = 1e-3}, {});
  const auto device = make_host_device({.memory_bytes = 400_KiB});
  Engine engine(config_, model_, *device);
  const auto elsewhere = [](const auto& call) { std::thread(call).join(); };
  elsewhere([&] { engine.initialize(toy_values()); });
  const Stream stream(*device, "compute");
  for (int i = 0; i < 3; ++i) {
    std::optional<Step> step;
    elsewhere([&] { step.emplace(engine.begin_step({.learning_rate = 1e-3})); });
    elsewhere([&] { walk_step(*step, model_, engine, *device, stream, config_, 1); });
    elsewhere([&] { (void)step->finish(); });
    elsewhere([&] { step.reset(); });
  }
  elsewhere([&] { engine.drain(); });
  StateBytes state;
  elsewhere([&] { state = read_state(engine); });
  EXPECT_EQ(state, expected.state);
  elsewhere([&] { engine.close(); });
}

INSTANTIATE_TEST_SUITE_P(Policies, FinishOptionsCheck,
                         testing::Values(OverlapPolicy::kSerial, OverlapPolicy::kEager),
                         [](const auto& policy) { return std::string(name_of(policy.param)); });

// Returns two ranks' states after a step under speculation, which has assumed the rate `begin`. If
// `disagrees`, the first call of finish() has other rates on one rank than on the other.
std::vector<StateBytes> states_of_two_ranks(const Config& config, double begin, double end,
                                            bool disagrees) {
  LocalWorld world(2, {.timeout_s = 20, .sum = sum_in_order});
  const ModelSpec model = toy_model();
  std::vector<StateBytes> states(2);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_host_device({.memory_bytes = 64_MiB});
      const auto collectives = world.join(rank, *device);
      Engine engine(config, model, *device, collectives.get());
      EXPECT_GT(placement_of(engine).shadow_bytes, 0u);
      engine.initialize(toy_values());
      const Stream stream(*device, "compute");
      Step step = engine.begin_step({.learning_rate = begin});
      walk_step(step, model, engine, *device, stream, config, 1);
      if (disagrees)
        (void)expect_error(ErrorCode::kRanks,
                           [&] { (void)step.finish({.learning_rate = end * (1 + rank)}); });
      const StepReport report = step.finish({.learning_rate = end});
      EXPECT_EQ(report.policy, OverlapPolicy::kSpeculative);
      EXPECT_EQ(report.redone, begin != end);
      engine.drain();
      states[rank] = read_state(engine);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return states;
}

// Options of a call of finish() that has failed say nothing about the updates so far.
TEST(FinishOptionsOfRanks, OptionsOfAFailedCallAreForgotten) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, true, DType::kBf16);
  config.optimizer.overlap = OverlapPolicy::kSpeculative;
  config.optimizer.clip_norm = 1e9;
  const std::vector<StateBytes> expected = states_of_two_ranks(config, 1e-2, 1e-2, false);
  const std::vector<StateBytes> actual = states_of_two_ranks(config, 5e-3, 1e-2, true);
  EXPECT_TRUE(actual[0] == expected[0]);
  EXPECT_TRUE(actual[1] == expected[1]);
}

// A call that has failed leaves a step that may be finished again, with begin_step()'s options.
TEST(FinishOptionsOfRanks, AfterAFailedCallThoseOfTheBeginningCount) {
  const TempDirectory directory;
  Config config = sharded_config(directory.path(), 3, true, DType::kBf16);
  config.optimizer.overlap = OverlapPolicy::kSpeculative;
  config.optimizer.clip_norm = 1e9;
  const std::vector<StateBytes> expected = states_of_two_ranks(config, 1e-2, 1e-2, false);
  const std::vector<StateBytes> actual = states_of_two_ranks(config, 1e-2, 1e-2, true);
  EXPECT_TRUE(actual[0] == expected[0]);
  EXPECT_TRUE(actual[1] == expected[1]);
}

}  // namespace
}  // namespace sluice::test
