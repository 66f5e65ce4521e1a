// A replacement for the CUDA runtime. The replacement uses the host device. The replacement has the
// functions that gpu/cuda/*.cc call. The replacement is linked instead of the runtime, so that the
// CUDA device runs its contract tests without a GPU. The tests check how the code in gpu/cuda uses
// the runtime's promises. The tests do not check whether the CUDA runtime keeps its promises. Host
// functions of all streams run one at a time. CUDA's rules allow this order. There are several
// GPUs. Every thread has a current GPU, which is 0 at first, and nearly every call makes a context
// on the current GPU. Thread rule: any thread may call every function.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>

namespace sluice::test {

struct FakeCudaFailure {
  int status = 0;
  bool refuses_callbacks = true;
};
// After this call, every call of the runtime fails. The status of the failure is the cudaError_t in
// `status`. On a real device, an illegal memory access of a kernel makes every later call fail.
// Pending callbacks get this status. The status 0 ends the failure. In CUDA, such a failure never
// ends. With `refuses_callbacks`, cudaStreamAddCallback fails, too.
void fail_fake_cuda(FakeCudaFailure failure);
// The next call of cudaStreamAddCallback fails. Later calls succeed again.
void refuse_next_fake_cuda_callback();

// From now on, a thread that changes its current GPU calls `work` first. An empty function ends
// this.
void call_at_fake_cuda_gpu_changes(std::function<void()> work);

// From now on, every GPU tells this PCI address, such as "0000:00:01.0". If `address` is empty, as
// at first, each GPU has an address of its own, at which there is no device.
void set_fake_cuda_pci_address(const std::string& address);

// The answer of the driver to cuMemcpyBatchAsync. A driver before CUDA 12.8 does not have this
// function.
enum class FakeCudaBatches : std::uint8_t { kTaken, kRefused, kUnknown };
void set_fake_cuda_batches(FakeCudaBatches batches);

// The first function returns the number of bytes that cudaMalloc has allocated. The second function
// returns the number of bytes of registered host pages.
std::uint64_t fake_cuda_allocated_bytes();
std::uint64_t fake_cuda_registered_bytes();
// Returns the number of streams and events that have been made and not destroyed.
std::uint64_t fake_cuda_objects();

// Returns the GPUs on which a context has been made since the last call of this function. On a real
// GPU, a context takes about 0.5 GB.
std::set<int> take_fake_cuda_contexts();

// The function launches a kernel. The kernel runs `work` on `stream`, a cudaStream_t. Kernels of
// different streams run at the same time. The first launch on a GPU loads the kernel called `name`.
// A kernel without a name needs no loading. If the launch fails, cudaGetLastError returns the
// error. Requires: the stream's GPU is the thread's current GPU.
void launch_fake_cuda(void* stream, std::function<void()> work, const char* name = nullptr);

// Returns the kernels that have been loaded since the last call of this function. The result
// contains a kernel only if the GPU already had a communicator when the kernel was loaded. A
// deadlock can arise if a kernel is loaded while a communicator exists. During the load, CUDA holds
// a lock and waits for the GPU's work. The GPU's work may wait for another rank's work. The other
// rank then waits for this rank's next call. If all kernels are loaded at the start
// (CUDA_MODULE_LOADING=EAGER), the result is empty.
std::set<std::string> take_fake_cuda_late_loads();
// The function unloads all kernels. The state is then the same as in a new process.
void unload_fake_cuda_kernels();
// The memory that each communicator takes on a GPU.
inline constexpr std::uint64_t kFakeCommunicatorBytes = std::uint64_t{16} << 20;

inline constexpr int kFakeCudaGpus = 5;
// The memory of all fake GPUs together.
inline constexpr std::uint64_t kFakeCudaMemoryBytes = std::uint64_t{3} << 29;

}  // namespace sluice::test
