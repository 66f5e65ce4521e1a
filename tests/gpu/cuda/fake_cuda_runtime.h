// A stand-in for the CUDA runtime over the host device: the functions that gpu/cuda_*.cc call,
// linked in their place, so that the device over CUDA runs its contract tests without a GPU. It
// proves what that code does with the runtime's promises, not the promises. Host functions of all
// streams run one at a time, as CUDA reserves the right to. There are several GPUs; every thread
// has a current one, 0 at first, and nearly every call makes a context on that.
// Thread rule: every function from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>

namespace sluice::test {

// From now on every call fails with `status`, a cudaError_t, and pending callbacks are told of it,
// as after a kernel's illegal access; 0 ends that, which CUDA never does. `refuses_callbacks`: also
// cudaStreamAddCallback fails. `at_callback`: not from now on, but from so many calls of that
// function on, the next one being 1.
struct FakeCudaFailure {
  int status = 0;
  bool refuses_callbacks = true;
  std::uint64_t at_callback = 0;
};
void fail_fake_cuda(FakeCudaFailure failure);
// The next cudaStreamAddCallback fails, and nothing else.
void refuse_next_fake_cuda_callback();

// Bytes that cudaMalloc has handed out, and host pages that are registered.
std::uint64_t fake_cuda_allocated_bytes();
std::uint64_t fake_cuda_registered_bytes();

// GPUs on which a context has been made since the last call. Each costs about 0.5 GB on a real one.
std::set<int> take_fake_cuda_contexts();

// A kernel: runs on `stream`, a cudaStream_t, beside the kernels of other streams. Under its first
// launch on a GPU the kernel called `name` is loaded; without a name it is there already.
// Requires: the stream's GPU is the thread's current one.
void launch_fake_cuda(void* stream, std::function<void()> work, const char* name = nullptr);

// Kernels that were loaded on a GPU while a communicator existed there, since the last call: CUDA
// waits under a lock for the GPU's work then, which may wait for another rank's, which waits for
// this rank's next call. Loading everything at the start (CUDA_MODULE_LOADING=EAGER) has none.
std::set<std::string> take_fake_cuda_late_loads();
// As in a new process.
void unload_fake_cuda_kernels();
// Communicators on a GPU, and the memory that each takes there.
inline constexpr std::uint64_t kFakeCommunicatorBytes = std::uint64_t{16} << 20;

inline constexpr int kFakeCudaGpus = 5;
// The memory that the fake GPUs have together.
inline constexpr std::uint64_t kFakeCudaMemoryBytes = std::uint64_t{3} << 29;

}  // namespace sluice::test
