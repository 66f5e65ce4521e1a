// Every kernel that the program can launch, so that all kernels can be loaded before the program
// needs the first kernel. CUDA loads a kernel at the kernel's first launch, and waits for the GPU's
// work while loading. Suppose that the GPU's work is a collective that waits for another rank. If
// the other rank waits for this rank's next call, both ranks wait forever.
//
// Thread rule: kernels are listed while the program starts; after that, every function from any
// thread.
#pragma once

#include <span>

#include <sluice/cuda_device.h>

namespace sluice {

// Launches one kernel without work, on a cudaStream_t of the current GPU.
// Fails with: as SLUICE_CUDA.
using EmptyLaunch = void (*)(void* stream);

// Lists a kernel. Code that launches the kernel has a ListedKernel with static storage, and refers
// to it.
class ListedKernel {
 public:
  explicit ListedKernel(EmptyLaunch launch);
};

std::span<const EmptyLaunch> listed_kernels();

// Launches every listed kernel once without work, and waits until the code of all kernels is on the
// GPU.
// Fails with: as SLUICE_CUDA.
void load_kernels(CudaDevice& device);

}  // namespace sluice
