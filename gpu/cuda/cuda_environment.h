// What the CUDA runtime reads from the environment when it is first called. A program of its own
// sets it before that; a library in somebody's process does not.
#pragma once

#include <string>

namespace sluice {

// All code is loaded at the start (CUDA_MODULE_LOADING=EAGER), so that none is behind a collective
// that waits; streams do not share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS=32): the engine has
// more than the eight that there are by default, and a copy that waits would hold up computation.
// What is set already stays.
// Requires: no other thread runs yet, and the runtime has not been called.
void prepare_cuda_environment();

struct CudaEnvironment {
  std::string description;  // of both, for people
  std::string advice;       // empty when both are as above or better
};
CudaEnvironment look_at_cuda_environment();

}  // namespace sluice
