// A list of every kernel that the program can launch. With the list, all kernels can be loaded
// before the program needs the first kernel. CUDA loads a kernel at the kernel's first launch.
// While CUDA loads the kernel, CUDA waits for the GPU's work. Suppose that the GPU's work is a
// collective that waits for another rank. If the other rank waits for this rank's next call, both
// ranks wait forever.
//
// Thread rule: kernels are put on the list while the program starts. After that, any thread may
// call every function.
#pragma once

#include <span>

#include <sluice/cuda_device.h>

namespace sluice {

// A function of this type launches one kernel on a cudaStream_t of the current GPU. The launch does
// no work.
// Fails with the errors of SLUICE_CUDA.
using EmptyLaunch = void (*)(void* stream);

// Puts a kernel on the list. Code that launches the kernel has a ListedKernel object with static
// storage, and refers to this object.
class ListedKernel {
 public:
  explicit ListedKernel(EmptyLaunch launch);
};

std::span<const EmptyLaunch> listed_kernels();

// The function launches every kernel of the list once. The launches do no work. The function then
// waits until the code of all kernels is on the GPU.
// Fails with the errors of SLUICE_CUDA.
void load_kernels(CudaDevice& device);

}  // namespace sluice
