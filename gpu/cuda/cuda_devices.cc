// Lists the GPUs.
#include <cuda_runtime.h>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/units.h>
#include "gpu/cuda/cuda_error.h"

namespace sluice {

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();
  return 0;
}

std::string why_no_cuda_device(int ordinal) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    (void)cudaGetLastError();
    return fmt::format("no usable GPU: {}", cudaGetErrorString(status));
  }
  if (ordinal >= count)
    return fmt::format("there is no GPU {}: the driver lists {}", ordinal, count);
  return "";
}

std::string describe_cuda_device(int ordinal) {
  cudaDeviceProp properties{};
  SLUICE_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  return fmt::format("{}, compute capability {}.{}, {}", properties.name, properties.major,
                     properties.minor, format_bytes(properties.totalGlobalMem));
}

}  // namespace sluice
