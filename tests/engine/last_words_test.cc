// A failure that strikes after the application's last call: close() throws it, and where nothing
// asks, the destructor says it.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/engine_over_queue.h"
#include "engine/plan/layout.h"
#include "tests/support/expect_error.h"
#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

class LastWords : public testing::Test {
 protected:
  LastWords() {
    config_.placement = {TierChoice::kNvme, TierChoice::kNvme};
    config_.optimizer.overlap = OverlapPolicy::kDeferred;
  }

  // One step, whose update fails at its first write, behind finish().
  std::unique_ptr<Engine> trained_with_a_failing_update() {
    const Layout layout(validated(model_), state_format(config_), config_.storage.block_elements);
    std::uint64_t initial_writes = 2 * layout.blocks().size();
    auto engine = std::unique_ptr<Engine>(new Engine(
        EngineOverQueue::make(config_, model_, *device_, [&](std::unique_ptr<IoQueue> queue) {
          auto wrapped = make_fault_queue(std::move(queue),
                                          {.at = initial_writes, .error = ENXIO, .sticky = true});
          faults_ = wrapped.get();
          return wrapped;
        })));
    engine->set_last_words([this](const std::string& words) { said_.push_back(words); });
    engine->initialize(toy_values());
    return engine;
  }

  // Until the fault has struck, which latches it before the engine's destructor can end.
  void train(Engine& engine) {
    const Stream stream(*device_, "compute");
    try {
      Step step = engine.begin_step({.learning_rate = 1e-2});
      walk_step(step, model_, engine, *device_, stream, config_, 1);
      (void)step.finish();
    } catch (const Error&) {
      heard_ = true;
    }
    while (faults_->struck() == 0) std::this_thread::yield();
  }

  TempDirectory directory_;
  Config config_ = toy_config(directory_.path());
  ModelSpec model_ = toy_model();
  std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 64_MiB});
  FaultQueue* faults_ = nullptr;
  std::vector<std::string> said_;
  bool heard_ = false;
};

TEST_F(LastWords, CloseThrowsWhatTheLastUpdateFailedWith) {
  auto engine = std::make_unique<Engine>(config_, model_, *device_);
  engine->set_last_words([this](const std::string& words) { said_.push_back(words); });
  engine->initialize(toy_values());
  const Stream stream(*device_, "compute");
  {
    Step step = engine->begin_step({.learning_rate = 3e38});
    walk_step(step, model_, *engine, *device_, stream, config_, 1);
    try {
      (void)step.finish();
    } catch (const Error&) {
      // The update was as fast as finish().
    }
  }
  for (int time = 0; time < 2; ++time) {
    try {
      engine->close();
      FAIL() << "the update overflows";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("overflow in step 1"), std::string::npos)
          << error.what();
    }
  }
  engine.reset();
  EXPECT_TRUE(said_.empty()) << said_[0];  // it has been heard
}

// Where the failure is as fast as finish(), that one throws it: then the run is repeated.
TEST_F(LastWords, TheDestructorSaysWhatNobodyHasHeard) {
  // Parameters in memory: the first transfers after initialization are those of the update.
  config_.placement = {TierChoice::kHost, TierChoice::kNvme};
  for (int attempt = 0; attempt < 50; ++attempt) {
    heard_ = false;
    said_.clear();
    auto engine = trained_with_a_failing_update();
    train(*engine);
    engine.reset();
    EXPECT_EQ(said_.size(), heard_ ? 0u : 1u);
    if (heard_) continue;
    EXPECT_NE(said_[0].find("of unit \""), std::string::npos) << said_[0];
    EXPECT_NE(said_[0].find("No such device"), std::string::npos) << said_[0];
    return;
  }
  FAIL() << "in each of 50 runs finish() has thrown it";
}

TEST_F(LastWords, AnEngineThatHasNothingToSayIsSilent) {
  {
    Engine engine(config_, model_, *device_);
    engine.set_last_words([this](const std::string& words) { said_.push_back(words); });
    (void)run_toy(engine, model_, *device_, config_, {.steps = 2});
  }
  EXPECT_TRUE(said_.empty()) << said_[0];
}

TEST_F(LastWords, WhatTheyThrowGoesNoFurther) {
  config_.placement = {TierChoice::kHost, TierChoice::kNvme};
  auto engine = trained_with_a_failing_update();
  engine->set_last_words([](const std::string&) { throw std::runtime_error("no paper"); });
  train(*engine);
  engine.reset();
}

}  // namespace
}  // namespace sluice::test
