// A stand-in for the CUDA runtime over the host device: the functions that gpu/cuda_*.cc call,
// linked in their place, so that the device over CUDA runs its contract tests without a GPU. It
// proves what that code does with the runtime's promises, not the promises. Host functions of all
// streams run one at a time, as CUDA reserves the right to.
// Thread rule: every function from any thread.
#pragma once

#include <cstdint>
#include <functional>

namespace sluice::test {

// From now on every call fails with `status`, a cudaError_t, and pending callbacks are told of it,
// as after a kernel's illegal access; 0 ends that, which CUDA never does. `refuses_callbacks`: also
// cudaStreamAddCallback fails.
struct FakeCudaFailure {
  int status = 0;
  bool refuses_callbacks = true;
};
void fail_fake_cuda(FakeCudaFailure failure);

// Bytes that cudaMalloc has handed out, and host pages that are registered.
std::uint64_t fake_cuda_allocated_bytes();
std::uint64_t fake_cuda_registered_bytes();

// A kernel: runs on `stream`, a cudaStream_t, beside the kernels of other streams.
void launch_fake_cuda(void* stream, std::function<void()> work);

// The memory that the fake GPU has.
inline constexpr std::uint64_t kFakeCudaMemoryBytes = std::uint64_t{1} << 30;

}  // namespace sluice::test
