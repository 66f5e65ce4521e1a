// Every kernel that the program can launch, so that all of them can be loaded before the first is
// needed. CUDA loads a kernel at its first launch, and meanwhile waits for the GPU's work. If that
// work is a collective that waits for another rank, and that rank waits for this one's next call,
// both are stuck.
//
// Thread rule: kernels are listed while the program starts; after that, every function from any
// thread.
#pragma once

#include <span>

#include <sluice/cuda_device.h>

namespace sluice {

// Launches one kernel with no work, on a cudaStream_t of the current GPU.
// Fails with: as SLUICE_CUDA.
using EmptyLaunch = void (*)(void* stream);

// Lists a kernel. Code that launches the kernel has one with static storage, and uses it.
class ListedKernel {
 public:
  explicit ListedKernel(EmptyLaunch launch);
};

std::span<const EmptyLaunch> listed_kernels();

// Launches every listed kernel once with no work, and waits: its code is on the GPU then.
// Fails with: as SLUICE_CUDA.
void load_kernels(CudaDevice& device);

}  // namespace sluice
