#include "tools/gpt/train/host_trainer.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cmath>
#include <fstream>

#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/tools/train/small_gpt.h"

namespace sluice {
namespace {

using test::small_train_config;
using test::SmallGpt;

class TrainerTest : public testing::Test {
 protected:
  TrainerTest() {
    std::ofstream(folder_.file("text")) << std::string(1000, 'a') + std::string(1000, 'b');
    config_ = small_train_config(folder_.path(), DType::kBf16);
    config_.data_file = folder_.file("text");
    config_.micro_batches = 2;
  }

  // Trains until an error comes; returns whether one came.
  bool fails(std::uint64_t failing_request) {
    const Dataset dataset(config_);
    SmallGpt gpt(config_, [&](std::unique_ptr<IoQueue> queue) {
      return test::make_fault_queue(std::move(queue), {.at = failing_request, .error = ENXIO});
    });
    try {
      gpt.engine().initialize(gpt.initial_values());
      HostTrainer trainer(gpt.config(), dataset, gpt.engine(), gpt.device());
      for (std::uint64_t step = 0; step < 2; ++step) {
        (void)trainer.train_step(step);
        (void)trainer.evaluate(dataset.validation_batches(2));
      }
      return false;
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kIo || error.code() == ErrorCode::kPoisoned)
          << error.what();
      return true;
    }
  }

  test::TempDirectory folder_;
  TrainConfig config_;
};

// One transfer after the other fails: an error comes out every time, nothing hangs, and work that
// was enqueued touches nothing that is gone (AddressSanitizer).
TEST_F(TrainerTest, StopsCleanlyWhereverATransferFails) {
  std::uint64_t failing = 0;
  while (fails(failing)) failing += 1 + failing / 8;
  EXPECT_GT(failing, 100u) << "a run must have more transfers than that";
}

TEST_F(TrainerTest, StopsCleanlyWhereverATransferOfActivationsFails) {
  config_.engine.placement = {.parameters = TierChoice::kHost, .optimizer = TierChoice::kHost};
  config_.engine.activations = {
      .home = ActivationHome::kNvme, .micro_batches = 2, .order = MicroBatchOrder::kVertical};
  config_.order = MicroBatchOrder::kVertical;
  config_.model.layers = 8;
  config_.engine.memory.device_bytes = 250 << 10;
  std::uint64_t failing = 0;
  while (fails(failing)) failing += 1 + failing / 8;
  EXPECT_GT(failing, 30u) << "a run must have more transfers than that";
}

TEST_F(TrainerTest, LearnsWhatIsThere) {
  config_.micro_batches = 1;
  config_.learning_rate = 1e-2;
  config_.engine.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  const Dataset dataset(config_);
  SmallGpt gpt(config_);
  gpt.engine().initialize(gpt.initial_values());
  HostTrainer trainer(gpt.config(), dataset, gpt.engine(), gpt.device());
  const auto batches = dataset.validation_batches(4);
  const double before = trainer.evaluate(batches);
  EXPECT_NEAR(before, std::log(256.0), 0.5) << "an untrained model knows nothing";
  EXPECT_EQ(trainer.evaluate(batches), before) << "evaluation changes nothing";
  for (std::uint64_t step = 0; step < 60; ++step) (void)trainer.train_step(step);
  EXPECT_LT(trainer.evaluate(batches), 1.0);
}

}  // namespace
}  // namespace sluice
