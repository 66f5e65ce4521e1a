// Transfers that fail, at every point of a run: a typed error or the right bits, never a hang,
// never a silent wrong.
#include <gtest/gtest.h>

#include <cerrno>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "tests/support/fault_queue.h"
#include "tests/support/same_training.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class EngineFault : public testing::TestWithParam<bool> {};

TEST_P(EngineFault, AFailedTransferStopsTheEngineAndSaysWhere) {
  const bool sticky = GetParam();
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kNvme, TierChoice::kNvme};
  config.memory.host_bytes = 1_MiB;
  const ToyOptions options{.steps = 1};
  const ToyResult expected = toy_oracle(config, options);
  std::uint32_t failures = 0;
  // Every seventh request from initialization to the read-back of the state.
  for (std::uint64_t fail_at = 0; fail_at < 500; fail_at += 7) {
    SCOPED_TRACE(fail_at);
    const auto device = make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 0});
    const ModelSpec model = toy_model();
    Engine engine =
        EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
          return make_fault_queue(std::move(queue),
                                  {.at = fail_at, .error = ENXIO, .sticky = sticky});
        });
    try {
      EXPECT_TRUE(same_training(run_toy(engine, model, *device, config, options), expected));
    } catch (const Error& error) {
      ++failures;
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      const std::string message = error.what();
      EXPECT_NE(message.find("of unit \""), std::string::npos) << message;
      EXPECT_NE(message.find(directory.path()), std::string::npos) << message;
      EXPECT_NE(message.find("No such device"), std::string::npos) << message;
    }
  }
  EXPECT_GT(failures, 20u);
}

INSTANTIATE_TEST_SUITE_P(OnceAndForGood, EngineFault, testing::Bool(),
                         [](const auto& tested) { return tested.param ? "sticky" : "once"; });

TEST(EnginePoison, AfterAFailureDuringTheUpdateEveryCallSaysWhichStepWasComplete) {
  const TempDirectory directory;
  Config config = toy_config(directory.path());
  config.placement = {TierChoice::kHost, TierChoice::kNvme};
  config.optimizer.overlap = OverlapPolicy::kSerial;
  const auto device = make_host_device({.memory_bytes = 64_MiB, .copy_bytes_per_second = 0});
  const ModelSpec model = toy_model();
  IoQueue* queue_seen = nullptr;
  // Parameters are in host memory, so the first requests after initialization are those of the
  // update.
  const auto blocks =
      Layout(validated(model), state_format(config), config.storage.block_elements).blocks().size();
  Engine engine =
      EngineOverQueue::make(config, model, *device, [&](std::unique_ptr<IoQueue> queue) {
        auto wrapped = make_fault_queue(std::move(queue), {.at = blocks + 5, .error = ENXIO});
        queue_seen = wrapped.get();
        return wrapped;
      });
  ASSERT_NE(queue_seen, nullptr);
  engine.initialize(toy_values());
  const Stream stream(*device, "compute");
  {
    Step step = engine.begin_step({.learning_rate = 1});
    walk_step(step, model, engine, *device, stream, config, 1);
    EXPECT_THROW((void)step.finish(), Error);
  }
  for (int call = 0; call < 5; ++call) {
    try {
      if (call == 0) (void)engine.begin_step({.learning_rate = 1});
      if (call == 1) engine.drain();
      if (call == 2) (void)read_state(engine);
      if (call == 3) (void)engine.begin_inference();
      if (call == 4) engine.close();
      FAIL() << "call " << call;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kPoisoned);
      EXPECT_NE(std::string(error.what()).find("neither that of step 0 nor of step 1"),
                std::string::npos)
          << error.what();
    }
  }
}

}  // namespace
}  // namespace sluice::test
