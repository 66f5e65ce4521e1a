// Where a GPU hangs, over the stand-in for the CUDA runtime and a tree as the kernel's.
#include "gpu/cuda/cuda_locality.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/numa.h"
#include "tests/gpu/cuda/fake_cuda_faults.h"
#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

class CudaLocality : public testing::Test {
 protected:
  ~CudaLocality() override { (void)test::disarm_fake_cuda_fault(); }

  // GPU `ordinal` of the stand-in hangs near these processors.
  void put(int ordinal, const std::string& processors) const {
    const std::string device = sysfs() + "/bus/pci/devices/0000:3b:00." + std::to_string(ordinal);
    std::filesystem::create_directories(device);
    std::ofstream(device + "/local_cpulist") << processors << "\n";
  }
  std::string sysfs() const { return folder_.file("sys"); }

 private:
  test::TempDirectory folder_;
};

TEST_F(CudaLocality, TheKernelTellsTheProcessorsNearAGpu) {
  put(2, "16-31,48-63");
  EXPECT_EQ(cuda_pci_address(2), "0000:3b:00.2") << "as the kernel writes it";
  EXPECT_EQ(processors_near(cuda_pci_address(2), sysfs()), "16-31,48-63");
  EXPECT_EQ(processors_near(cuda_pci_address(1), sysfs()), "");
  EXPECT_EQ(cuda_pci_address(99), "");
  EXPECT_EQ(processors_near("", sysfs()), "");
}

// In a process of its own, since the choice is for good.
TEST_F(CudaLocality, OneOfSeveralProcessesStaysNearItsGpu) {
  put(0, NumaNodes::of_machine().processors());
  put(1, "99990-99999");
  const auto stays = [this] {
    if (stay_near_gpu(0, 1, sysfs())) return 1;  // alone: all nodes are its own
    if (stay_near_gpu(1, 4, sysfs())) return 2;  // it may use none of those
    if (stay_near_gpu(3, 4, sysfs())) return 3;  // the kernel does not tell
    if (NumaNodes::of_machine().is_part()) return 4;
    if (!stay_near_gpu(0, 4, sysfs())) return 5;
    return NumaNodes::of_machine().is_part() ? 0 : 6;
  };
  EXPECT_EXIT(std::_Exit(stays()), testing::ExitedWithCode(0), "");
}

TEST_F(CudaLocality, AGpuThatDoesNotTellItsAddressChangesNothing) {
  put(0, "0-3");
  test::arm_fake_cuda_fault({.function = "cudaDeviceGetPCIBusId", .at_call = 1, .status = 999});
  EXPECT_FALSE(stay_near_gpu(0, 4, sysfs()));
  EXPECT_FALSE(NumaNodes::of_machine().is_part());
}

}  // namespace
}  // namespace sluice
