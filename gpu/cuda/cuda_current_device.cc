#include "gpu/cuda/cuda_current_device.h"

#include <cuda_runtime.h>

#include "gpu/cuda/cuda_error.h"

namespace sluice {
namespace {

// cuDevicePrimaryCtxGetState; the runtime has no such function. It is looked up through the
// runtime, because a program linked to the driver's library would not start without a driver. A
// CUdevice is the runtime's ordinal.
using ContextState = int (*)(int device, unsigned* flags, int* is_active);

ContextState find_context_state() {
  void* function = nullptr;
  constexpr const char* kName = "cuDevicePrimaryCtxGetState";
#if CUDART_VERSION >= 12050
  constexpr unsigned kSinceVersion = 7000;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(kName, &function, kSinceVersion, cudaEnableDefault);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault);
#endif
  if (status == cudaSuccess) return reinterpret_cast<ContextState>(function);
  (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
  return nullptr;
}

// Whether the process has a context on that GPU. Requires: the current device has one.
bool has_context(int ordinal) {
  static const ContextState context_state = find_context_state();
  unsigned flags = 0;
  int is_active = 0;
  return context_state != nullptr && context_state(ordinal, &flags, &is_active) == 0 &&
         is_active != 0;
}

}  // namespace

CudaCurrentDevice::CudaCurrentDevice(int ordinal, std::nothrow_t, int* status) noexcept {
  cudaError_t result = cudaGetDevice(&previous_);
  if (result == cudaSuccess && previous_ != ordinal) {
    result = cudaSetDevice(ordinal);
    has_changed_ = result == cudaSuccess;
  }
  if (status != nullptr) *status = static_cast<int>(result);
}

CudaCurrentDevice::CudaCurrentDevice(int ordinal) {
  SLUICE_CUDA(cudaGetDevice(&previous_));
  if (previous_ == ordinal) return;
  SLUICE_CUDA(cudaSetDevice(ordinal));
  has_changed_ = true;
}

CudaCurrentDevice::~CudaCurrentDevice() {
  if (has_changed_ && has_context(previous_)) (void)cudaSetDevice(previous_);
}

}  // namespace sluice
