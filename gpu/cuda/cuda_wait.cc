#include "gpu/cuda/cuda_wait.h"

#include <cuda_runtime.h>

#include <chrono>
#include <thread>

#include "gpu/cuda/cuda_current_device.h"

namespace sluice {
namespace {

constexpr std::chrono::milliseconds kPause{1};

cudaError_t await_event(cudaEvent_t event) {
  const cudaError_t status = cudaEventSynchronize(event);
  if (status == cudaSuccess) return status;
  while (cudaEventQuery(event) == cudaErrorNotReady) std::this_thread::sleep_for(kPause);
  (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
  return status;
}

}  // namespace

int wait_for_cuda_event(int ordinal, void* event) noexcept {
  int chosen = 0;
  const CudaCurrentDevice current(ordinal, std::nothrow, &chosen);
  const cudaError_t status = await_event(static_cast<cudaEvent_t>(event));
  return status != cudaSuccess ? status : chosen;
}

int wait_for_cuda_stream(int ordinal, void* stream, void* event) noexcept {
  int chosen = 0;
  const CudaCurrentDevice current(ordinal, std::nothrow, &chosen);
  cudaError_t status =
      cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream));
  if (status == cudaSuccess) {
    status = await_event(static_cast<cudaEvent_t>(event));
  } else {
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(stream));
    (void)cudaGetLastError();
  }
  return status != cudaSuccess ? status : chosen;
}

}  // namespace sluice
