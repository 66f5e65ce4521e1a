// Training as on a GPU, over the host device.
#include "tools/gpt/train/gpu_trainer.h"

#include <gtest/gtest.h>

#include <sluice/error.h>
#include "tests/tools/gpt/train/gpu_trainer_cases.h"
#include "tools/gpt/train/compute_device.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, GpuTrainerTest, testing::Values(gpt::host_machine()),
                         device_machine_name);

class NotingOps final : public gpt::DeviceOpsOver<HostLauncher> {
 public:
  explicit NotingOps(HostDevice& device)
      : DeviceOpsOver(HostLauncher(device), DType::kFp32, DType::kFp32) {}
  std::vector<std::string> take_notes() override { return {"a product is slow"}; }
};

TEST(GpuTrainer, TellsTheUserWhatTheOperationsNote) {
  const test::TempDirectory folder;
  std::ofstream(folder.file("text")) << std::string(3000, 'a');
  TrainConfig config = test::small_train_config(folder.path(), DType::kFp32);
  config.data_file = folder.file("text");
  const Dataset dataset(config);
  const auto device = make_host_device({.memory_bytes = 256_MiB, .has_own_memory = true});
  NotingOps ops(*device);
  gpt::DeviceGpt model(config.model, {.batch = config.sequences, .sequence = config.model.context},
                       *device, ops);
  const test::SmallGpt values(config);
  Engine engine(config.engine, validated(gpt::gpt_model_spec(config.model)), *device);
  engine.initialize(values.initial_values());
  GpuTrainer trainer(config, dataset, engine, *device, model);
  EXPECT_EQ(trainer.train_step(0).report.notes, std::vector<std::string>{"a product is slow"});
}

TEST(ComputeDevice, SaysWhyItIsTheHost) {
  TrainConfig config;
  config.engine.memory.device_bytes = 1_MiB;
  config.device = DeviceChoice::kHost;
  EXPECT_EQ(ComputeDevice(config).description(), "the host");
  if (why_no_cuda_device().empty()) GTEST_SKIP() << "this machine has a GPU";
  config.device = DeviceChoice::kAuto;
  EXPECT_EQ(ComputeDevice(config).description(), "the host (" + why_no_cuda_device() + ")");
  config.device = DeviceChoice::kCuda;
  try {
    const ComputeDevice refused(config);
    FAIL() << "there is no GPU";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find(why_no_cuda_device()), std::string::npos);
  }
}

TEST(ComputeDevice, AutoLeavesFp16ToTheHost) {
  TrainConfig config;
  config.engine.memory.device_bytes = 1_MiB;
  config.engine.precision = {.parameters = DType::kFp16, .gradients = DType::kFp16};
  EXPECT_TRUE(ComputeDevice(config).description().starts_with("the host ("));
}

}  // namespace
}  // namespace sluice
