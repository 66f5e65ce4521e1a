// The environment variables that the CUDA runtime reads at its first call. A program may set the
// variables before this call. If Sluice is a library inside another program's process, Sluice does
// not set the variables.
#pragma once

#include <string>

namespace sluice {

// The function sets CUDA_MODULE_LOADING=EAGER. With this setting, CUDA loads all code at the start,
// so that CUDA loads no code while a collective waits. The function also sets
// CUDA_DEVICE_MAX_CONNECTIONS=32. With this setting, each stream has its own hardware queue. The
// default is eight queues, but the engine has more than eight streams. In a shared queue, a waiting
// copy would delay computation. The function does not change variables that are already set.
// Requires: no other thread runs yet, and the runtime has not been called.
void prepare_cuda_environment();

struct CudaEnvironment {
  std::string description;  // both settings, as a text for users
  std::string advice;       // empty if both settings are at least as good as described above
};
CudaEnvironment look_at_cuda_environment();

}  // namespace sluice
