// The number of requests to the stand-in for NCCL (fake_nccl.cc) since the last call. The function
// is found by its symbol in the library. Thread rule: any thread.
#pragma once

#include <dlfcn.h>

#include <sluice/error.h>

struct fake_nccl_counts {
  int reductions = 0;   // by NCCL itself
  int buffers = 0;      // registered and not given back
  int windows = 0;      // counted like buffers
  int allocations = 0;  // counted like buffers
  // Counts requests of ranks whose offset in a symmetric window differs from that of rank 0.
  int unequal_offsets = 0;
};

extern "C" fake_nccl_counts fake_nccl_take_counts();

// `path` is the library's path.
inline fake_nccl_counts take_fake_nccl_counts(const char* path) {
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  SLUICE_CHECK(library != nullptr, "the fake is there");
  return reinterpret_cast<decltype(&fake_nccl_take_counts)>(
      ::dlsym(library, "fake_nccl_take_counts"))();
}
