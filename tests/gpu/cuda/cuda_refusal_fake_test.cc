// GPUs and memory that cannot be used, over a stand-in for the CUDA runtime: the reasons.
#include <gtest/gtest.h>

#include <cuda_runtime.h>

#include <string>

#include <sluice/cuda_device.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"

namespace sluice {
namespace {

TEST(FakeCudaRefusal, KernelsDoNotRunOnAGpuThatThisBuildHasNoCodeFor) {
  ASSERT_EQ(why_no_cuda_code(1), "");
  EXPECT_EQ(why_no_cuda_code(99), why_no_cuda_device(99));
  if (!test::set_fake_cuda_capability(35)) GTEST_SKIP() << "the build does not know for which GPUs";
  const std::string why = why_no_cuda_code(1);
  EXPECT_NE(why.find("and fake GPU has compute capability 3.5; build with "
                     "-DSLUICE_CUDA_ARCHITECTURES=35-real"),
            std::string::npos)
      << why;
  EXPECT_EQ(describe_cuda_device(1).find("fake GPU, compute capability 3.5, "), 0u);
  EXPECT_EQ(why_no_cuda_device(1), "") << "it takes copies";
  EXPECT_NE(make_cuda_device({.ordinal = 1, .memory_bytes = 1_MiB}), nullptr);
  test::set_fake_cuda_capability(0);
}

// 2 is the number of the GPU's memory that is out, too.
TEST(FakeCudaRefusal, PagesThatCannotBeLockedNameTheHostsMemoryAlone) {
  const auto device = make_cuda_device({.memory_bytes = 1_MiB});
  AlignedBuffer host(8192, "a test");
  test::arm_fake_cuda_fault(
      {.function = "cudaHostRegister", .at_call = 1, .status = cudaErrorMemoryAllocation});
  try {
    device->register_host_memory(host.span());
    ADD_FAILURE() << "the runtime refuses it";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    for (const char* part : {"cannot page-lock 8", "cudaHostRegister", "(2)", "memory.host"})
      EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in: " << text;
    for (const char* part : {"memory.device", "batch.sequences"})
      EXPECT_EQ(text.find(part), std::string::npos) << text;
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "a kernel launched now would look failed";
  (void)test::disarm_fake_cuda_fault();
}

}  // namespace
}  // namespace sluice
