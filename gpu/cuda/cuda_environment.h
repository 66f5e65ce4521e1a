// The environment variables that the CUDA runtime reads at the first call. A program may set the
// variables before the first call. A library inside another program's process does not set the
// variables.
#pragma once

#include <string>

namespace sluice {

// Sets CUDA_MODULE_LOADING=EAGER, which loads all code at the start. So no code has to be loaded
// while a collective waits. Sets CUDA_DEVICE_MAX_CONNECTIONS=32, which gives each stream a hardware
// queue. The engine has more streams than the default of eight queues, and a waiting copy would
// delay computation in the same queue. The function does not change variables that are already set.
// Requires: no other thread runs yet, and the runtime has not been called.
void prepare_cuda_environment();

struct CudaEnvironment {
  std::string description;  // both settings, for people
  std::string advice;       // empty when both settings are as above or better
};
CudaEnvironment look_at_cuda_environment();

}  // namespace sluice
