// The choice of run.device on a machine with a GPU, over the stand-in for the CUDA runtime. Only
// choices that end before a kernel would be needed.
#include "tools/gpt/train/compute_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tests/gpu/cuda/fake_cuda_faults.h"
#include "tests/tools/gpt/train/small_gpt.h"
#include "tools/commands/doctor_command.h"

namespace sluice {
namespace {

struct Obstacle {
  std::string key;  // of the config, which the message names
  std::function<void(TrainConfig& config)> put;
};

const std::vector<Obstacle>& obstacles() {
  static const std::vector<Obstacle> all{{"precision.parameters", [](TrainConfig& config) {
                                            config.engine.precision.parameters = DType::kFp16;
                                            config.engine.precision.gradients = DType::kFp16;
                                          }}};
  return all;
}

TrainConfig config_with(const Obstacle& obstacle, DeviceChoice device) {
  TrainConfig config = test::small_train_config("/tmp", DType::kBf16);
  config.device = device;
  obstacle.put(config);
  return config;
}

TEST(ComputeDeviceWithAGpu, AutoThatEndsOnTheHostSaysWhyInALineOfItsOwn) {
  ASSERT_EQ(why_no_cuda_device(), "") << "the stand-in has GPUs";
  for (const Obstacle& obstacle : obstacles()) {
    const ComputeDevice device(config_with(obstacle, DeviceChoice::kAuto));
    EXPECT_TRUE(device.is_host());
    EXPECT_NE(device.unused_gpu().find("a GPU is here and is not used (fake GPU"),
              std::string::npos)
        << device.unused_gpu();
    EXPECT_NE(device.unused_gpu().find(obstacle.key), std::string::npos) << device.unused_gpu();
    EXPECT_EQ(device.unused_gpu().find('\n'), std::string::npos);
  }
}

TEST(ComputeDeviceWithAGpu, CudaRefusesTheSameAndNamesTheKey) {
  for (const Obstacle& obstacle : obstacles()) {
    const TrainConfig config = config_with(obstacle, DeviceChoice::kCuda);
    for (const auto& call : std::vector<std::function<void()>>{
             [&] { check_gpu_config(config); }, [&] { const ComputeDevice device(config); }}) {
      try {
        call();
        ADD_FAILURE() << obstacle.key << " was taken";
      } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
        EXPECT_NE(text.find("run.device is \"cuda\""), std::string::npos) << text;
        EXPECT_NE(text.find(obstacle.key), std::string::npos) << text;
      }
    }
  }
}

TEST(ComputeDeviceWithAGpu, TheHostThatWasAskedForIsNoSurprise) {
  for (const Obstacle& obstacle : obstacles()) {
    const ComputeDevice device(config_with(obstacle, DeviceChoice::kHost));
    EXPECT_EQ(device.unused_gpu(), "");
    EXPECT_EQ(device.description(), "the host");
  }
}

class WithAGpuWithoutCode : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::set_fake_cuda_capability(35))
      GTEST_SKIP() << "the build does not know for which GPUs";
  }
  ~WithAGpuWithoutCode() override { test::set_fake_cuda_capability(0); }
};

constexpr const char* kNoCode = "and fake GPU has compute capability 3.5";

TEST_F(WithAGpuWithoutCode, AutoComputesOnTheHostAndSaysWhy) {
  TrainConfig config = test::small_train_config("/tmp", DType::kFp32);
  config.device = DeviceChoice::kAuto;
  EXPECT_TRUE(computes_on_host(config));
  const ComputeDevice device(config);
  EXPECT_TRUE(device.is_host());
  EXPECT_NE(device.description().find(kNoCode), std::string::npos) << device.description();
  EXPECT_EQ(device.unused_gpu().find("a GPU is here and is not used (fake GPU"), 0u)
      << device.unused_gpu();
  EXPECT_NE(device.unused_gpu().find(kNoCode), std::string::npos) << device.unused_gpu();
}

TEST_F(WithAGpuWithoutCode, CudaIsRefusedWithTheReason) {
  TrainConfig config = test::small_train_config("/tmp", DType::kFp32);
  config.device = DeviceChoice::kCuda;
  try {
    const ComputeDevice device(config);
    ADD_FAILURE() << "there is no code for it";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(text.find(kNoCode), std::string::npos) << text;
    EXPECT_NE(text.find("-DSLUICE_CUDA_ARCHITECTURES=35-real"), std::string::npos) << text;
  }
}

TEST_F(WithAGpuWithoutCode, DoctorWarnsAndNamesTheBuild) {
  const std::vector<Finding> findings = examine({.paths = {}});
  const auto cuda = std::ranges::find(findings, "CUDA", &Finding::subject);
  ASSERT_NE(cuda, findings.end());
  EXPECT_EQ(cuda->health, Health::kWarn);
  EXPECT_TRUE(
      cuda->text.ends_with(std::string(kNoCode) + ": run.device \"auto\" computes on the host"))
      << cuda->text;
  EXPECT_EQ(cuda->remedy, "build with -DSLUICE_CUDA_ARCHITECTURES=35-real");
  EXPECT_EQ(std::ranges::find(findings, "NCCL", &Finding::subject), findings.end());
}

// The versions are those of tests/gpu/ranks/nccl_limits_test.cc.
TEST(DoctorWithAGpu, NamesTheVersionOfNcclAndItsLimit) {
  const auto found = [](const std::string& library) {
    const std::vector<Finding> findings = examine({.paths = {}, .nccl_library = library});
    const auto finding = std::ranges::find(findings, "NCCL", &Finding::subject);
    return finding == findings.end() ? std::string("none") : finding->text;
  };
  ::setenv("FAKE_NCCL_VERSION", "22707", 1);
  EXPECT_EQ(found(FAKE_NCCL).find("2.27.7; NCCL 2.27.7 has no windows for copy engines"), 0u)
      << found(FAKE_NCCL);
  ::unsetenv("FAKE_NCCL_VERSION");
  const std::string missing = found("/nowhere/libnccl.so.2");
  EXPECT_NE(missing.find("/nowhere/libnccl.so.2"), std::string::npos) << missing;
  EXPECT_NE(missing.find(": one GPU only"), std::string::npos) << missing;
}

}  // namespace
}  // namespace sluice
