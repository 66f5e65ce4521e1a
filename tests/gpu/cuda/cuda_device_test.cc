// The device contract on a GPU, and what only this device has: page-locked memory that io_uring has
// registered, errors in words, a machine without a GPU.
#include <sluice/cuda_device.h>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/cuda/cuda_error.h"
#include "io/direct_file.h"
#include "tests/contract/device_contract.h"
#include "tests/support/request_batch.h"
#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceContract,
                         testing::Values(DeviceFactory{
                             "cuda",
                             [](std::uint64_t memory_bytes) -> std::unique_ptr<Device> {
                               if (!why_no_cuda_device().empty()) return nullptr;
                               return make_cuda_device({.memory_bytes = memory_bytes});
                             }}),
                         device_factory_name);

class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cuda_device(); !why.empty()) GTEST_SKIP() << why;
  }
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(CudaDeviceTest, SaysWhichGpuItIs) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  EXPECT_TRUE(device->name().starts_with("cuda:0 ")) << device->name();
  EXPECT_TRUE(contains(describe_cuda_device(), "compute capability")) << describe_cuda_device();
  EXPECT_EQ(device->ordinal(), 0);
}

TEST_F(CudaDeviceTest, TakesWhatIsFreeLessAReserve) {
  const auto device = make_cuda_device();
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  EXPECT_GT(device->capacity_bytes(), 0u);
  EXPECT_LT(device->capacity_bytes(), free_bytes);
}

TEST_F(CudaDeviceTest, RefusesABudgetBeyondTheGpu) {
  try {
    make_cuda_device({.memory_bytes = std::uint64_t{1} << 50});
    FAIL() << "a petabyte was granted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    EXPECT_TRUE(contains(error.what(), "memory.device")) << error.what();
  }
}

// The budget allows it, the GPU does not: others have its memory.
TEST_F(CudaDeviceTest, MemoryThatOthersHoldIsNamedWithTheTableOfPools) {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  const auto device = make_cuda_device({.memory_bytes = total_bytes});
  const DeviceBuffer window(*device, 16_MiB, "parameter window");
  try {
    const DeviceBuffer rest(*device, total_bytes - 16_MiB, "boundary activations");
    GTEST_SKIP() << "the driver keeps nothing of this GPU's memory for itself";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    for (const char* part : {"boundary activations", "parameter window", "16.0 MiB", " free of "})
      EXPECT_TRUE(contains(error.what(), part)) << part << " is missing in: " << error.what();
  }
  EXPECT_EQ(device->allocated_bytes(), 16_MiB);
}

// One arena, page-locked for the GPU and registered with the ring: bytes go from the file through
// it to the device and back.
TEST_F(CudaDeviceTest, PageLockedMemoryIsRegisteredWithIoUringToo) {
  constexpr std::uint64_t kBytes = 4_MiB;
  const test::TempDirectory directory;
  const auto device = make_cuda_device({.memory_bytes = 8_MiB});
  const Stream stream(*device, "test");
  HostArray arena(*device, 2 * kBytes);
  std::unique_ptr<IoQueue> queue;
  try {
    queue = make_uring_queue({.depth = 8, .memory = {arena.data(), arena.size_bytes()}});
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  EXPECT_EQ(queue->note(), "");
  const DirectFile file = DirectFile::create_scratch(directory.path(), kBytes);
  arena.fill_pattern(9);
  const std::vector<std::byte> written(arena.data(), arena.data() + kBytes);
  test::RequestBatch write(1);
  write.set(0, IoKind::kWrite, file.descriptor(), 0, {arena.data(), kBytes});
  write.submit_and_wait(*queue);
  ASSERT_EQ(write[0].error, 0);
  std::byte* const back = arena.data() + kBytes;
  test::RequestBatch read(1);
  read.set(0, IoKind::kRead, file.descriptor(), 0, {back, kBytes});
  read.submit_and_wait(*queue);
  ASSERT_EQ(read[0].error, 0);
  const DeviceBuffer buffer(*device, kBytes, "test");
  device->copy(buffer.data(), back, kBytes, stream.id());
  device->copy(arena.data(), buffer.data(), kBytes, stream.id());
  device->synchronize(stream.id());
  EXPECT_EQ(std::memcmp(arena.data(), written.data(), kBytes), 0);
}

TEST_F(CudaDeviceTest, FreshMemoryIsZeroForStreamsOfEveryPriority) {
  const auto device = make_cuda_device({.memory_bytes = 64_MiB});
  for (const StreamPriority priority : {StreamPriority::kNormal, StreamPriority::kHigh}) {
    const Stream stream(*device, "test", priority);
    HostArray host(*device, 32_MiB);
    const DeviceBuffer buffer(*device, 32_MiB, "test");
    device->copy(host.data(), buffer.data(), 32_MiB, stream.id());
    device->synchronize(stream.id());
    for (std::uint64_t i = 0; i < 32_MiB; i += 4093) ASSERT_EQ(host.data()[i], std::byte{0});
  }
}

// These need the runtime alone.

TEST(CudaError, NamesCallPlaceErrorAndRemedy) {
  const auto text_of = [](cudaError_t status) -> std::string {
    try {
      SLUICE_CUDA(status);
    } catch (const Error& error) {
      return std::string(name_of(error.code())) + " " + error.what();
    }
    return "";
  };
  EXPECT_EQ(text_of(cudaSuccess), "");
  const std::string refused = text_of(cudaErrorMemoryAllocation);
  for (const char* part : {"status at ", "cuda_device_test.cc:", "cudaErrorMemoryAllocation (2)",
                           "out of memory", "lower memory.device"})
    EXPECT_TRUE(contains(refused, part)) << part << " is missing in: " << refused;
  EXPECT_TRUE(contains(text_of(cudaErrorIllegalAddress), "compute-sanitizer"));
  EXPECT_TRUE(contains(text_of(cudaErrorInsufficientDriver), "run.device"));
}

TEST(CudaError, CodesTellTheMachineFromTheBudget) {
  const auto code_of = [](cudaError_t status) {
    return cuda_error(static_cast<int>(status), "call", "file", 1).code();
  };
  EXPECT_EQ(code_of(cudaErrorMemoryAllocation), ErrorCode::kOutOfMemory);
  EXPECT_EQ(code_of(cudaErrorInsufficientDriver), ErrorCode::kUnsupported);
  EXPECT_EQ(code_of(cudaErrorNoDevice), ErrorCode::kUnsupported);
  EXPECT_EQ(code_of(cudaErrorLaunchFailure), ErrorCode::kInternal);
}

TEST(CudaError, CodeThatTheBuildOrTheDriverDoesNotHaveIsUnsupported) {
  for (const cudaError_t status : {cudaErrorInvalidDeviceFunction, cudaErrorNoKernelImageForDevice,
                                   cudaErrorInvalidPtx, cudaErrorUnsupportedPtxVersion,
                                   cudaErrorJitCompilerNotFound, cudaErrorJitCompilationDisabled}) {
    const Error error = cuda_error(static_cast<int>(status), "call", "file", 1);
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
    EXPECT_TRUE(contains(error.what(), "build with its SLUICE_CUDA_ARCHITECTURES")) << error.what();
  }
}

TEST(CudaDeviceWithoutGpu, IsRefusedWithTheReason) {
  const std::string why = why_no_cuda_device();
  if (why.empty()) GTEST_SKIP() << "this machine has a GPU";
  try {
    make_cuda_device({.memory_bytes = 1_MiB});
    FAIL() << "there is no GPU, and yet a device was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(std::string(error.what()), why);
  }
}

}  // namespace
}  // namespace sluice
