#include "gpu/cuda/cuda_error.h"

#include <cuda_runtime.h>

#include <string_view>

#include <fmt/format.h>

namespace sluice {
namespace {

struct Advice {
  ErrorCode code;
  std::string_view remedy;
};

Advice advice_for(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return {ErrorCode::kOutOfMemory,
              "lower memory.device or batch.sequences, or stop other GPU users (nvidia-smi)"};
    case cudaErrorInsufficientDriver:
      return {ErrorCode::kUnsupported,
              "no NVIDIA driver, or one older than this build's CUDA runtime; install a newer one, "
              "or set run.device to \"host\""};
    case cudaErrorNoDevice:
      return {
          ErrorCode::kUnsupported,
          "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES, or set run.device to "
          "\"host\""};
    case cudaErrorInvalidDevice:
      return {ErrorCode::kUnsupported, "nvidia-smi -L lists the GPUs, counted from 0"};
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      return {ErrorCode::kUnsupported,
              "this build has no code for this GPU; build with its SLUICE_CUDA_ARCHITECTURES"};
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
      return {ErrorCode::kInternal,
              "a kernel failed, perhaps an earlier one; run under compute-sanitizer and report "
              "what it prints"};
    case cudaErrorECCUncorrectable:
      return {ErrorCode::kInternal, "the GPU's memory is damaged; nvidia-smi -q -d ECC says more"};
    case cudaErrorHostMemoryAlreadyRegistered:
      return {ErrorCode::kInternal, "two pieces of page-locked memory share a page"};
    default: return {ErrorCode::kInternal, "nvidia-smi and dmesg may say more"};
  }
}

}  // namespace

Error cuda_error(int status, const char* expression, const char* file, int line) {
  const auto code = static_cast<cudaError_t>(status);
  const Advice advice = advice_for(code);
  (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
  return {advice.code,
          fmt::format("{} at {}:{}: {} ({}): {}; {}", expression, file, line,
                      cudaGetErrorName(code), status, cudaGetErrorString(code), advice.remedy)};
}

int take_cuda_error() noexcept {
  return static_cast<int>(cudaGetLastError());
}

}  // namespace sluice
