// Memory of the stand-in for NCCL: allocations and windows.
#include <nccl.h>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "tests/gpu/ranks/fake_nccl.h"
#include "tests/gpu/ranks/fake_nccl_communicator.h"

using namespace sluice::test;

namespace sluice::test {

int current_fake_gpu() {
  int gpu = 0;
  (void)cudaGetDevice(&gpu);
  return gpu;
}

void visit_fake_gpu(int gpu) {
  const int before = current_fake_gpu();
  if (before == gpu) return;
  (void)cudaSetDevice(gpu);
  (void)cudaSetDevice(before);
}

}  // namespace sluice::test

extern "C" {

ncclResult_t ncclMemAlloc(void** memory, std::size_t size) {
  FAKE_NCCL_ENTER;
  count_fake_nccl(&fake_nccl_counts::allocations);
  return cudaMalloc(memory, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* memory) {
  count_fake_nccl(&fake_nccl_counts::allocations, -1);
  const cudaError_t status = cudaFree(memory);
  FAKE_NCCL_ENTER;
  return status == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, std::size_t size_bytes,
                                    ncclWindow_t* window, int flags) {
  FAKE_NCCL_ENTER_WITH(comm);
  if (flags != NCCL_WIN_COLL_SYMMETRIC) return ncclInvalidArgument;
  if (reinterpret_cast<std::uintptr_t>(memory) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
    comm->world->violate("a window that does not begin at a multiple of 4096 bytes");
    return ncclInvalidArgument;
  }
  const std::scoped_lock lock(comm->mutex);
  comm->world->compare_window(comm->windows_made++, size_bytes);
  *window = nullptr;
  if (fake_nccl_multicast_is("absent")) return ncclSuccess;
  count_fake_nccl(&fake_nccl_counts::windows);
  comm->window.reset(new ncclWindow_vidmem{static_cast<const char*>(memory), size_bytes});
  comm->window_place = window;
  comm->polls = 0;
  return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  require_fake_nccl(comm, __func__);
  visit_fake_gpu(comm->gpu);
  {
    const std::scoped_lock lock(comm->mutex);
    std::erase(comm->windows, window);
  }
  count_fake_nccl(&fake_nccl_counts::windows, -1);
  delete window;
  FAKE_NCCL_ENTER;
  return ncclSuccess;
}

}  // extern "C"
