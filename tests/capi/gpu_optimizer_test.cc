// An optimizer with tensors on a GPU through the C interface, over a stand-in for the CUDA runtime.
#include <cuda_runtime.h>

#include <cstring>
#include <string>
#include <vector>

#include "capi/sluice_gpu.h"
#include "tests/capi/capi_support.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"

namespace sluice::test {
namespace {

constexpr std::uint64_t kElements = 100'000;

// Memory and a stream of the GPU that the program has made itself.
class CApiGpu : public CApi {
 protected:
  CApiGpu() {
    EXPECT_EQ(cudaMalloc(&parameter_, kElements * sizeof(float)), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&gradient_, kElements * sizeof(float)), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, 0), cudaSuccess);
    fill(parameter_, 1.0f);
    fill(gradient_, 0.5f);
  }
  ~CApiGpu() override {
    sluice_optimizer_destroy(optimizer_);
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    EXPECT_EQ(cudaFree(gradient_), cudaSuccess);
    EXPECT_EQ(cudaFree(parameter_), cudaSuccess);
  }

  static void fill(void* memory, float value) {
    for (std::uint64_t i = 0; i < kElements; ++i) static_cast<float*>(memory)[i] = value;
  }

  sluice_status make(bool is_on_gpu, int gpu = 0) {
    const std::string text = R"({"optimizer": {"type": "adamw"}, "placement": {"optimizer": "nvme"},
                              "memory": {"host": "8MiB"}, "storage": {"paths": [")" +
                             directory_.path() + R"("]}})";
    const sluice_optimizer_tensor tensor{"weight", kElements, SLUICE_FP32, is_on_gpu ? 1u : 0u};
    return is_on_gpu ? sluice_optimizer_create_on_gpu(text.c_str(), &tensor, 1, gpu, &optimizer_)
                     : sluice_optimizer_create(text.c_str(), &tensor, 1, &optimizer_);
  }

  sluice_update update(void* parameter, std::uint64_t step) const {
    return adam_update(parameter, gradient_, step);
  }

  // On the stand-in's GPU, memory is the host's.
  std::vector<float> values(const void* memory) const {
    std::vector<float> all(kElements);
    std::memcpy(all.data(), memory, kElements * sizeof(float));
    return all;
  }

  sluice_optimizer* optimizer_ = nullptr;
  void* parameter_ = nullptr;
  void* gradient_ = nullptr;
  cudaStream_t stream_ = nullptr;
};

TEST_F(CApiGpu, HasTheBitsOfTensorsOnTheHost) {
  ASSERT_EQ(make(true), SLUICE_OK) << sluice_last_error();
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const sluice_update made = update(parameter_, step);
    ASSERT_EQ(sluice_optimizer_begin_on_gpu(optimizer_, &made, 1, stream_), SLUICE_OK)
        << sluice_last_error();
    ASSERT_EQ(sluice_optimizer_wait(optimizer_, 0), SLUICE_OK) << sluice_last_error();
  }
  const std::vector<float> on_gpu = values(parameter_);
  EXPECT_NE(on_gpu.front(), 1.0f);
  sluice_optimizer_destroy(optimizer_);
  optimizer_ = nullptr;

  ASSERT_EQ(make(false), SLUICE_OK) << sluice_last_error();
  std::vector<float> on_host(kElements, 1.0f);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const sluice_update made = update(on_host.data(), step);
    ASSERT_EQ(sluice_optimizer_begin(optimizer_, &made, 1), SLUICE_OK) << sluice_last_error();
    ASSERT_EQ(sluice_optimizer_wait_all(optimizer_), SLUICE_OK) << sluice_last_error();
  }
  EXPECT_EQ(on_gpu, on_host);
}

TEST_F(CApiGpu, WorkOnTheStreamComesBeforeTheUpdate) {
  ASSERT_EQ(make(true), SLUICE_OK) << sluice_last_error();
  const std::vector<float> late(kElements, -2.0f);
  std::vector<std::byte> bytes(kElements * sizeof(float));
  std::memcpy(bytes.data(), late.data(), bytes.size());
  ASSERT_EQ(cudaMemcpyAsync(gradient_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream_),
            cudaSuccess);
  const sluice_update made = update(parameter_, 1);
  ASSERT_EQ(sluice_optimizer_begin_on_gpu(optimizer_, &made, 1, stream_), SLUICE_OK)
      << sluice_last_error();
  ASSERT_EQ(sluice_optimizer_wait(optimizer_, SLUICE_ALL_TENSORS), SLUICE_OK)
      << sluice_last_error();
  EXPECT_GT(values(parameter_).back(), 1.0f) << "a negative gradient raises the parameter";
}

// An optimizer of fp32 parameters needs copies alone.
TEST_F(CApiGpu, AGpuThatTheBuildHasNoCodeForTakesCopies) {
  if (!set_fake_cuda_capability(35)) GTEST_SKIP() << "the build does not know for which GPUs";
  const char* why = nullptr;
  EXPECT_EQ(sluice_why_no_gpu(0, &why), SLUICE_OK);
  EXPECT_STREQ(why, "");
  EXPECT_EQ(make(true), SLUICE_OK) << sluice_last_error();
  set_fake_cuda_capability(0);
}

TEST_F(CApiGpu, MisuseIsRefused) {
  const char* why = nullptr;
  ASSERT_EQ(sluice_why_no_gpu(0, &why), SLUICE_OK);
  EXPECT_STREQ(why, "");
  for (const int gpu : {77, -1}) {
    ASSERT_EQ(sluice_why_no_gpu(gpu, &why), SLUICE_OK);
    EXPECT_STRNE(why, "");
    EXPECT_EQ(make(true, gpu), SLUICE_UNSUPPORTED) << sluice_last_error();
    EXPECT_EQ(optimizer_, nullptr);
  }
  ASSERT_EQ(make(false), SLUICE_OK) << sluice_last_error();
  const sluice_update made = update(parameter_, 1);
  EXPECT_EQ(sluice_optimizer_begin_on_gpu(optimizer_, &made, 1, stream_), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("made without a GPU"), std::string::npos);
}

}  // namespace
}  // namespace sluice::test
