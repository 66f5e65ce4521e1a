// DeviceMath on a GPU.
#include "gpu/cuda/cuda_launcher.h"
#include "gpu/cuda/device_math_choice.h"
#include "gpu/math/device_math_over.h"

namespace sluice {

std::unique_ptr<DeviceMath> make_cuda_math(CudaDevice& device) {
  const CudaCurrentDevice current(device.ordinal());
  cudaFuncAttributes attributes{};
  SLUICE_CUDA(cudaFuncGetAttributes(&attributes, elements_kernel<AccumulateBody<float>>));
  return std::make_unique<DeviceMathOver<CudaLauncher>>(CudaLauncher(device));
}

}  // namespace sluice
