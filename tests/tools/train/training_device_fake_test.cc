// The choice of run.device on a machine with a GPU, over the stand-in for the CUDA runtime. Only
// choices that end before a kernel would be needed.
#include "tools/gpt/train/compute_device.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tests/tools/train/small_gpt.h"
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

TEST(TrainingDeviceWithAGpu, AutoThatEndsOnTheHostSaysWhyInALineOfItsOwn) {
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

TEST(TrainingDeviceWithAGpu, CudaRefusesTheSameAndNamesTheKey) {
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

TEST(TrainingDeviceWithAGpu, TheHostThatWasAskedForIsNoSurprise) {
  for (const Obstacle& obstacle : obstacles()) {
    const ComputeDevice device(config_with(obstacle, DeviceChoice::kHost));
    EXPECT_EQ(device.unused_gpu(), "");
    EXPECT_EQ(device.description(), "the host");
  }
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
