// sluice/cuda_device.h and the headers beside it, for builds without CUDA.
#include <sluice/cuda_device.h>
#include <sluice/error.h>
#include "gpu/cuda/cuda_copies.h"
#include "gpu/cuda/cuda_locality.h"
#include "gpu/cuda/device_math_choice.h"
#include "gpu/cuda/kernel_list.h"

namespace sluice {

int cuda_device_count() {
  return 0;
}

std::string why_no_cuda_device(int) {
  return "this build has no CUDA (SLUICE_CUDA)";
}

std::string why_no_cuda_code(int ordinal) {
  return why_no_cuda_device(ordinal);
}

std::string describe_cuda_device(int ordinal) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device(ordinal));
}

bool stay_near_gpu(int, unsigned, const std::string&) {
  return false;
}

std::unique_ptr<CudaDevice> make_cuda_device(const CudaDeviceOptions& options) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device(options.ordinal));
}

double plain_copies_s(CudaDevice&, const CopyEnds&, const CopyEnds&, std::uint64_t, std::uint64_t,
                      unsigned) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device(0));
}

void load_kernels(CudaDevice&) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device(0));
}

std::unique_ptr<DeviceMath> make_cuda_math(CudaDevice&) {
  throw Error(ErrorCode::kUnsupported, why_no_cuda_device(0));
}

}  // namespace sluice
