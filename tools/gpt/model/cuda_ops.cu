#include "tools/gpt/model/cuda_ops.h"

#include "gpu/cuda/cuda_launcher.h"
#include "tools/gpt/model/cuda_ops_over.h"

namespace sluice::gpt {

std::unique_ptr<DeviceOps> make_cuda_ops(CudaDevice& device, DType type, DType gradient_type,
                                         ProductKernels products) {
  const CudaCurrentDevice current(device.ordinal());
  cudaFuncAttributes attributes{};
  SLUICE_CUDA(cudaFuncGetAttributes(&attributes, teams_kernel<MeanBody>));
  return std::make_unique<CudaOpsOver<CudaLauncher>>(device, type, gradient_type, products);
}

}  // namespace sluice::gpt
