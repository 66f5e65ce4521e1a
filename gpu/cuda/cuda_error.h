// The functions turn errors of the CUDA runtime into sluice::Error. The message has the failed
// call, the place of the call in the source, the error's name and number in CUDA, and a remedy.
#pragma once

#include <string>

#include <sluice/error.h>

namespace sluice {

// `status` is a cudaError_t. The function clears the thread's last error.
Error cuda_error(int status, const char* expression, const char* file, int line);

// Returns the thread's last error, a cudaError_t, and clears the error. For example, the caller can
// find out whether a launch has failed.
int take_cuda_error() noexcept;

}  // namespace sluice

// `expression` is a call of the CUDA runtime. The macro throws if the call does not return
// cudaSuccess.
// Fails with:
// - kOutOfMemory: the GPU has no room.
// - kUnsupported: there is no driver, no device, or no code for this device.
// - kInternal: anything else has failed.
#define SLUICE_CUDA(expression)                                                               \
  do {                                                                                        \
    if (const int sluice_cuda_status = static_cast<int>(expression); sluice_cuda_status != 0) \
        [[unlikely]]                                                                          \
      throw ::sluice::cuda_error(sluice_cuda_status, #expression, __FILE__, __LINE__);        \
  } while (false)
