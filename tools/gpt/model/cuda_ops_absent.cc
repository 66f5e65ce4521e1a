// The functions of tools/gpt/model/cuda_ops.h in a build without CUDA.
#include <sluice/error.h>
#include "tools/gpt/model/cuda_ops.h"

namespace sluice::gpt {

std::unique_ptr<DeviceOps> make_cuda_ops(CudaDevice&, DType, DType, ProductKernels) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device());
}

}  // namespace sluice::gpt
