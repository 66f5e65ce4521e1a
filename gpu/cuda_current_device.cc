#include "gpu/cuda_current_device.h"

#include <cuda_runtime.h>

#include "gpu/cuda_error.h"

namespace sluice {

CudaCurrentDevice::CudaCurrentDevice(int ordinal) {
  SLUICE_CUDA(cudaGetDevice(&previous_));
  if (previous_ == ordinal) return;
  SLUICE_CUDA(cudaSetDevice(ordinal));
  has_changed_ = true;
}

CudaCurrentDevice::~CudaCurrentDevice() {
  if (has_changed_) (void)cudaSetDevice(previous_);
}

}  // namespace sluice
