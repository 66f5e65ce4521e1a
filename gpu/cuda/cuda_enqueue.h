// The function launches a kernel. A failed launch counts as a failure of the device, just like a
// failed copy. The call synchronize() rethrows this failure. The launch itself does not throw,
// because the launching thread could not handle an error in the middle of its work. After a failure
// of the device, kernels are not launched. Thread rule: the same as for Device.
#pragma once

#include <new>

#include <sluice/cuda_device.h>
#include "gpu/cuda/cuda_current_device.h"
#include "gpu/cuda/cuda_error.h"

namespace sluice {

// While `launch` runs, the device's GPU is the current GPU.
template <class Launch>
void enqueue_kernel(CudaDevice& device, const Launch& launch) {
  if (device.has_failed()) return;
  int status = 0;
  const CudaCurrentDevice current(device.ordinal(), std::nothrow, &status);
  if (status == 0) {
    // An earlier call on this thread may have left an error. The application may have made the
    // earlier call. The error of an earlier call does not belong to the launch.
    (void)take_cuda_error();
    launch();
    status = take_cuda_error();
  }
  if (status != 0) device.fail(cuda_error(status, "a kernel's launch", __FILE__, __LINE__));
}

}  // namespace sluice
