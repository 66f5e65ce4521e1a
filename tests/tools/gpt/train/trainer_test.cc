#include "tools/gpt/train/host_trainer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <numeric>
#include <optional>
#include <vector>

#include "base/trace/trace_recorder.h"
#include "tests/support/fault_queue.h"
#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/train/small_gpt.h"

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

  // Batches that differ from each other.
  void write_varied_text() {
    std::ofstream text(folder_.file("text"));
    for (std::uint32_t i = 0; i < 2000; ++i) text << static_cast<char>('a' + i * i % 97 % 23);
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
        (void)trainer.evaluate(dataset.validation_batches(4));
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
  const auto batches = dataset.validation_batches(8);
  const double before = trainer.evaluate(batches);
  EXPECT_NEAR(before, std::log(256.0), 0.5) << "an untrained model knows nothing";
  EXPECT_EQ(trainer.evaluate(batches), before) << "evaluation changes nothing";
  for (std::uint64_t step = 0; step < 60; ++step) (void)trainer.train_step(step);
  EXPECT_LT(trainer.evaluate(batches), 1.0);
}

// Batches of 1 give the mean by hand; others end with a batch that is not full, or have only that.
TEST_F(TrainerTest, EverySequenceOfAValidationWeighsTheSame) {
  write_varied_text();
  config_.engine.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config_.validation_fraction = 0.0225;  // 45 of 2,000 tokens: five sequences of eight
  const auto losses_of = [&](std::uint32_t sequences) {
    config_.sequences = sequences;
    const Dataset dataset(config_);
    SmallGpt gpt(config_);
    gpt.engine().initialize(gpt.initial_values());
    HostTrainer trainer(gpt.config(), dataset, gpt.engine(), gpt.device());
    const auto batches = dataset.validation_batches(100);
    std::vector<double> losses{trainer.evaluate(batches)};
    for (const TokenBatch& batch : batches) losses.push_back(trainer.evaluate({&batch, 1}));
    return losses;
  };
  const std::vector<double> alone = losses_of(1);
  ASSERT_EQ(alone.size(), 1u + 5);
  EXPECT_NEAR(alone[0], std::accumulate(alone.begin() + 1, alone.end(), 0.0) / 5, 1e-12);
  EXPECT_GT(std::abs(alone[1] - alone[0]), 1e-4) << "they differ";
  for (const std::uint32_t sequences : {2u, 3u, 4u, 5u, 7u, 64u})
    EXPECT_NEAR(losses_of(sequences)[0], alone[0], 1e-6) << sequences;
}

// How often blocks were read for the uses of a step or an inference since the last call.
std::size_t reads() {
  std::size_t count = 0;
  for (const TraceRecord& record : trace_take()) count += record.kind == TraceKind::kRead ? 1 : 0;
  return count;
}

// Five and more batches at a time. The window does not hold the model, and no unit waits in a slot:
// each walk through the model reads the same number of blocks.
TEST_F(TrainerTest, AnEvaluationReadsTheParametersOnceForManyBatches) {
  write_varied_text();
  config_.engine.optimizer.overlap = OverlapPolicy::kSerial;
  config_.engine.memory.device_bytes = 160 << 10;
  config_.model.layers = 8;
  for (const bool keeps : {true, false}) {
    for (const bool tied : {true, false}) {
      config_.engine.activations.home = keeps ? ActivationHome::kKeep : ActivationHome::kHost;
      config_.model.tied_head = tied;
      const Dataset dataset(config_);
      SmallGpt gpt(config_);
      gpt.engine().initialize(gpt.initial_values());
      HostTrainer trainer(gpt.config(), dataset, gpt.engine(), gpt.device());
      const auto batches = dataset.validation_batches(12);
      ASSERT_EQ(batches.size(), 6u);
      trace_enable(1 << 16);
      double sum = 0;
      for (const TokenBatch& batch : batches) sum += trainer.evaluate({&batch, 1});
      const std::size_t alone = reads();
      const double together = trainer.evaluate(batches);
      const std::size_t once = reads();
      trace_enable(0);
      EXPECT_EQ(together, sum / 6) << "to the bit, in the same order";
      // Two groups where only the boundaries' values are kept: five at a time.
      EXPECT_GT(once, 0u);
      EXPECT_EQ(alone % 6, 0u);
      EXPECT_LE(once, (keeps ? 1 : 2) * alone / 6) << keeps << tied;
    }
  }
}

// At every moment of it; afterwards training goes on as if nothing had been asked.
TEST_F(TrainerTest, AnEvaluationStopsWhenItIsAskedTo) {
  write_varied_text();
  config_.engine.optimizer.overlap = OverlapPolicy::kSerial;
  const Dataset dataset(config_);
  SmallGpt untouched(config_), gpt(config_);
  for (SmallGpt* each : {&untouched, &gpt}) each->engine().initialize(each->initial_values());
  HostTrainer plain(untouched.config(), dataset, untouched.engine(), untouched.device());
  HostTrainer trainer(gpt.config(), dataset, gpt.engine(), gpt.device());
  const auto batches = dataset.validation_batches(8);
  std::atomic<int> questions = 0;
  int most = 0;
  const auto evaluate = [&] {
    questions = 0;
    const auto ask = [&] { return ++questions > most; };
    return trainer.evaluate_until({.is_asked = ask, .is_agreed = ask}, batches);
  };
  int stopped = 0;
  std::optional<double> loss;
  for (; !(loss = evaluate()); ++most) {
    // The questions of the batch and the use under way, and of those that are queued behind them.
    EXPECT_LE(questions, most + 4);
    ++stopped;
  }
  EXPECT_GT(stopped, 20) << "five uses by four batches";
  EXPECT_EQ(*loss, plain.evaluate(batches));
  for (std::uint64_t step = 0; step < 3; ++step) {
    EXPECT_EQ(trainer.train_step(step).loss, plain.train_step(step).loss);
    most = 7;
    EXPECT_FALSE(evaluate());
  }
}

}  // namespace
}  // namespace sluice
