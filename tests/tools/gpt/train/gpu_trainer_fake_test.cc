// The runtime's calls of a training step on a GPU, counted over the stand-in for the CUDA runtime.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <vector>

#include <sluice/cuda_device.h>
#include "tests/gpu/cuda/fake_cuda_launcher.h"
#include "tests/gpu/cuda/fake_cuda_log.h"
#include "tests/support/temp_directory.h"
#include "tests/tools/gpt/train/small_gpt.h"
#include "tools/gpt/model/device_ops_over.h"
#include "tools/gpt/train/gpu_trainer.h"

namespace sluice {
namespace {

using test::FakeCudaCall;

std::ptrdiff_t count(const std::vector<FakeCudaCall>& calls, FakeCudaCall::Kind kind) {
  return std::ranges::count(calls, kind, &FakeCudaCall::kind);
}

class GpuTrainerOverTheStandIn : public testing::Test {
 protected:
  GpuTrainerOverTheStandIn() {
    std::ofstream text(folder_.file("text"));
    for (int i = 0; i < 3000; ++i) text << static_cast<char>('a' + i * i % 7 + i % 3);
    text.close();
    config_.data_file = folder_.file("text");
    config_.micro_batches = 3;
    engine_.initialize(test::SmallGpt(config_).initial_values());
  }

  test::TempDirectory folder_;
  TrainConfig config_ = [this] {
    TrainConfig made = test::small_train_config(folder_.path(), DType::kBf16);
    made.micro_batches = 3;
    return made;
  }();
  std::unique_ptr<CudaDevice> device_ = make_cuda_device({.memory_bytes = 256_MiB});
  gpt::DeviceOpsOver<test::FakeCudaLauncher> ops_{test::FakeCudaLauncher(*device_), DType::kBf16,
                                                  DType::kBf16};
  gpt::DeviceGpt gpt_{config_.model,
                      {.batch = config_.sequences, .sequence = config_.model.context},
                      *device_,
                      ops_};
  Engine engine_{config_.engine, validated(gpt::gpt_model_spec(config_.model)), *device_};
};

TEST_F(GpuTrainerOverTheStandIn, NoStreamWaitsForTheHostInAStepOrAnEvaluation) {
  const Dataset dataset(config_);
  GpuTrainer trainer(config_, dataset, engine_, *device_, gpt_);
  test::log_fake_cuda_calls(true);
  const double first = trainer.train_step(0).loss;
  const double second = trainer.train_step(1).loss;
  const double validation = trainer.evaluate(dataset.validation_batches(4));
  const std::vector<FakeCudaCall> calls = test::take_fake_cuda_calls();
  EXPECT_GT(count(calls, FakeCudaCall::Kind::kKernel), 0);
  EXPECT_GE(count(calls, FakeCudaCall::Kind::kCopyDown), 2 * 3 + 2) << "each loss comes down";
  EXPECT_EQ(count(calls, FakeCudaCall::Kind::kCallback), 0);
  for (const double loss : {first, second, validation}) {
    EXPECT_GT(loss, 1);  // nats; a byte of the text is one of few letters
    EXPECT_LT(loss, 8);
  }
}

}  // namespace
}  // namespace sluice
