// Lists the GPUs.
#include <cuda_runtime.h>

#include <string_view>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/units.h>
#include "gpu/cuda/cuda_architectures.h"
#include "gpu/cuda/cuda_error.h"

namespace sluice {
namespace {

std::string text_of(int version) {
  return fmt::format("{}.{}", version / 1000, version / 10 % 100);
}

// The runtime says the same of a driver that is missing and of one that is too old.
std::string why_driver_is_insufficient() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) {
    (void)cudaGetLastError();
    return "there is no NVIDIA driver, or this process cannot load it; nvidia-smi tells more";
  }
  return fmt::format(
      "the NVIDIA driver is for CUDA {}, and this program needs CUDA {}.0; install a newer driver",
      text_of(version), CUDART_VERSION / 1000);
}

// Makes no context.
std::string why_no_code(int ordinal) {
  cudaDeviceProp found{};
  if (const cudaError_t status = cudaGetDeviceProperties(&found, ordinal); status != cudaSuccess)
    return cuda_error(status, "cudaGetDeviceProperties", __FILE__, __LINE__).what();
  const std::string_view compiled = compiled_cuda_architectures();
  if (runs_on_capability(compiled, found.major, found.minor)) return "";
  return fmt::format(
      "this build has code for {}, and {} has compute capability {}.{}; build with "
      "-DSLUICE_CUDA_ARCHITECTURES={}{}-real",
      compiled, found.name, found.major, found.minor, found.major, found.minor);
}

}  // namespace

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
    return fmt::format("no usable GPU: {}", status == cudaErrorInsufficientDriver
                                                ? why_driver_is_insufficient()
                                                : cudaGetErrorString(status));
  }
  if (ordinal < 0 || ordinal >= count)
    return fmt::format("there is no GPU {}: the driver lists {}", ordinal, count);
  return "";
}

std::string why_no_cuda_code(int ordinal) {
  const std::string why = why_no_cuda_device(ordinal);
  return why.empty() ? why_no_code(ordinal) : why;
}

std::string describe_cuda_device(int ordinal) {
  cudaDeviceProp properties{};
  SLUICE_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  return fmt::format("{}, compute capability {}.{}, {}", properties.name, properties.major,
                     properties.minor, format_bytes(properties.totalGlobalMem));
}

}  // namespace sluice
