// Marks a function that the CPU and CUDA kernels share. So both compute from one definition.
#pragma once

#ifdef __CUDACC__
#define SLUICE_HOST_DEVICE __host__ __device__
#else
#define SLUICE_HOST_DEVICE
#endif
