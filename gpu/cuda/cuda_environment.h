// The environment that the CUDA runtime reads at its first call. A program may set it before that;
// a library inside another program's process does not.
#pragma once

#include <string>

namespace sluice {

// Loads all code at the start (CUDA_MODULE_LOADING=EAGER), so that no code has to load behind a
// collective that waits. Gives streams hardware queues of their own
// (CUDA_DEVICE_MAX_CONNECTIONS=32): the engine has more than the default of eight, and a copy that
// waits would hold up computation. Variables that are set already stay.
// Requires: no other thread runs yet, and the runtime has not been called.
void prepare_cuda_environment();

struct CudaEnvironment {
  std::string description;  // both settings, for people
  std::string advice;       // empty when both are as above or better
};
CudaEnvironment look_at_cuda_environment();

}  // namespace sluice
