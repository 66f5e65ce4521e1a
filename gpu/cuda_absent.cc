// What gpu/cuda_device.h promises, in a build without CUDA.
#include "base/error.h"
#include "gpu/cuda_device.h"

namespace sluice {

std::string why_no_cuda_device(int) {
  return "this build has no CUDA (SLUICE_CUDA)";
}

std::string describe_cuda_device(int ordinal) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device(ordinal));
}

std::unique_ptr<CudaDevice> make_cuda_device(const CudaDeviceOptions& options) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device(options.ordinal));
}

}  // namespace sluice
