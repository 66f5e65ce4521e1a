// Training as on a GPU, over the host device.
#include "tools/device_trainer.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "tests/tools/device_trainer_cases.h"
#include "tools/training_device.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, DeviceTrainerTest, testing::Values(gpt::host_machine()),
                         device_machine_name);

TEST(TrainingDevice, SaysWhyItIsTheHost) {
  TrainConfig config;
  config.engine.memory.device_bytes = 1_MiB;
  config.device = DeviceChoice::kHost;
  EXPECT_EQ(TrainingDevice(config).description(), "the host");
  if (why_no_cuda_device().empty()) GTEST_SKIP() << "this machine has a GPU";
  config.device = DeviceChoice::kAuto;
  EXPECT_EQ(TrainingDevice(config).description(), "the host (" + why_no_cuda_device() + ")");
  config.device = DeviceChoice::kCuda;
  try {
    const TrainingDevice refused(config);
    FAIL() << "there is no GPU";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find(why_no_cuda_device()), std::string::npos);
  }
}

TEST(TrainingDevice, AutoLeavesFp16ToTheHost) {
  TrainConfig config;
  config.engine.memory.device_bytes = 1_MiB;
  config.engine.precision = {.parameters = DType::kFp16, .gradients = DType::kFp16};
  EXPECT_TRUE(TrainingDevice(config).description().starts_with("the host ("));
}

}  // namespace
}  // namespace sluice
