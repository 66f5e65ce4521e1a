// The device over CUDA against a stand-in for the runtime: the contract, and what happens when the
// GPU fails for good. Runs on machines without a GPU.
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "gpu/cuda_device.h"
#include "tests/contract/device_contract.h"
#include "tests/gpu/fake_cuda_runtime.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(FakeCuda, DeviceContract,
                         testing::Values(DeviceFactory{
                             "cuda",
                             [](std::uint64_t memory_bytes) -> std::unique_ptr<Device> {
                               return make_cuda_device({.memory_bytes = memory_bytes});
                             }}),
                         device_factory_name);

class FakeCuda : public testing::Test {
 protected:
  ~FakeCuda() override { test::fail_fake_cuda({.status = 0}); }
};

void expect_illegal_access(Device& device, StreamId stream) {
  try {
    device.synchronize(stream);
    ADD_FAILURE() << "no failure was reported";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(std::string(error.what()).find("(700)"), std::string::npos) << error.what();
  }
}

// Nobody waits for ever, whether the runtime still takes callbacks or not.
TEST_F(FakeCuda, AfterAFailureOfTheGpuEveryHostFunctionStillRuns) {
  for (const bool refuses_callbacks : {false, true}) {
    test::fail_fake_cuda({.status = 0});
    const auto device = make_cuda_device({.memory_bytes = 1_MiB});
    std::atomic<int> ran{0};
    {
      const Stream stream(*device, "test");
      const Event event(*device);
      HostArray host(*device, 4096);
      const DeviceBuffer buffer(*device, 4096, "test");
      Gate gate;
      gate.block(*device, stream.id());
      device->call_host(stream.id(), [&ran] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // nobody may leave before
        ++ran;
      });
      test::fail_fake_cuda(
          {.status = cudaErrorIllegalAddress, .refuses_callbacks = refuses_callbacks});
      device->copy(buffer.data(), host.data(), 4096, stream.id());
      device->call_host(stream.id(), [&ran] { ++ran; });
      device->record(event.id(), stream.id());
      device->wait(stream.id(), event.id());
      EXPECT_TRUE(device->is_complete(event.id()));
      gate.open();
      expect_illegal_access(*device, stream.id());
      device->call_host(stream.id(), [&ran] { ++ran; });
    }
    EXPECT_EQ(ran, 3);
  }
}

TEST_F(FakeCuda, MemoryThatCannotBeHadAfterAllIsNotInTheBooks) {
  const auto device = make_cuda_device({.memory_bytes = test::kFakeCudaMemoryBytes});
  EXPECT_THROW(device->allocate(test::kFakeCudaMemoryBytes, "all of it"), Error);
  EXPECT_EQ(device->allocated_bytes(), 0u);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a kernel launched now would look failed";
}

TEST_F(FakeCuda, PagesAreRegisteredInWholeAndGivenBack) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  {
    const HostArray host(*device, 4097);
    EXPECT_EQ(test::fake_cuda_registered_bytes(), 8192u);
  }
  EXPECT_EQ(test::fake_cuda_registered_bytes(), 0u);
}

TEST_F(FakeCuda, WaitingForAnEventLeavesNoErrorBehind) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  const Stream stream(*device, "test");
  const Event event(*device);
  Gate gate;
  gate.block(*device, stream.id());
  device->record(event.id(), stream.id());
  EXPECT_FALSE(device->is_complete(event.id()));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(FakeCuda, GivesAllItsMemoryBack) {
  const std::uint64_t before = test::fake_cuda_allocated_bytes();
  const auto device = make_cuda_device({.memory_bytes = 64_MiB});
  {
    const DeviceBuffer buffer(*device, 3_MiB + 1, "test");
    EXPECT_GE(test::fake_cuda_allocated_bytes(), before + 3_MiB);
  }
  EXPECT_EQ(test::fake_cuda_allocated_bytes(), before);
}

}  // namespace
}  // namespace sluice
