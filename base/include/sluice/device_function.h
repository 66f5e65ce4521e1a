// Marks a function that is compiled both for the CPU and for CUDA kernels. So the CPU and the
// kernels share one definition.
#pragma once

#ifdef __CUDACC__
#define SLUICE_HOST_DEVICE __host__ __device__
#else
#define SLUICE_HOST_DEVICE
#endif
