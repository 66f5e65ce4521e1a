// A Device for an NVIDIA GPU. The device uses the memory, streams, events and copies of the CUDA
// runtime. The runtime is linked statically and finds the driver at the first call. So a program
// that contains the CUDA device starts on any machine, and can call why_no_cuda_device().
//
// Thread rule: the same as for Device.
// The CUDA device adds rules to the contract of Device. Host functions of different streams may run
// one after another. So no host function may wait for a host function of another stream. If a host
// function throws, the failure affects work that is enqueued later. The failure does not affect
// copies that are already in a stream. A copy from host to host runs on a thread of the CUDA
// runtime. The GPU also makes copies to and from GPU memory that other code, such as PyTorch, has
// allocated.
// After a call, the calling thread has the same current GPU as before, if the process has a context
// on that GPU. Otherwise, the GPU of the device stays current.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <sluice/device.h>
#include <sluice/error.h>
#include <sluice/export.h>

namespace sluice {

// A source of device memory that replaces cudaMalloc. Each function returns whether the call
// succeeded.
struct CudaMemorySource {
  std::function<bool(void** memory, std::size_t size_bytes)> allocate;
  std::function<bool(void* memory)> free;
};

struct CudaDeviceOptions {
  int ordinal = 0;
  // The limit for the sum of all allocations. 0 means the free memory minus a reserve for libraries
  // and kernels. If the value is 0, each call of capacity_bytes() asks the GPU again. So planners
  // call capacity_bytes() after everything else has been allocated.
  std::uint64_t memory_bytes = 0;
  CudaMemorySource memory_source = {};  // empty = cudaMalloc
};

class SLUICE_EXPORT CudaDevice : public Device {
 public:
  virtual int ordinal() const = 0;
  // Returns the cudaStream_t of `stream`, so that callers can launch kernels on `stream`. The
  // result is valid while the stream exists.
  virtual void* native_stream(StreamId stream) const = 0;
  // Makes a Stream from `native`. `native` is a cudaStream_t that belongs to the application or to
  // another library. An example is PyTorch's current stream. A null `native` stands for the default
  // stream of this GPU. The new Stream keeps leases in order with the work that the owner of
  // `native` enqueues on `native`. No further events are needed for this order.
  // The device does not take ownership of `native`. `native` must stay valid until the Stream is
  // destroyed. The destructor of the Stream waits for all work that is already on `native`. The
  // device then forgets `native`. The device must outlive the Stream. While the Stream exists, the
  // owner may enqueue work on `native`, but may not capture a graph.
  // Fails with kInvalidArgument if the device already has this stream, or if the runtime says that
  // `native` is not a stream of this GPU.
  virtual Stream adopt_stream(void* native) = 0;
  // Tells the device that work on the device has failed with `failure`. `failure` is the error of
  // work that the caller itself has enqueued. Later copies are then skipped, and synchronize()
  // rethrows `failure`. The first failure is kept.
  virtual void fail(const Error& failure) noexcept = 0;
  // Returns whether work on the device is known to have failed. Code that launches kernels on the
  // device then skips the launch, as the device skips copies.
  virtual bool has_failed() const noexcept = 0;
};

// Returns the number of GPUs that the process may use on this machine. The result is 0 if there is
// no driver.
SLUICE_EXPORT int cuda_device_count();
// Returns the reason why GPU `ordinal` cannot be used. The result is empty if the GPU can be used.
SLUICE_EXPORT std::string why_no_cuda_device(int ordinal = 0);
// Returns the reason why Sluice's kernels do not run on GPU `ordinal`. One reason is that Sluice
// has been compiled for other compute capabilities. Copies work on such a GPU. The result is empty
// if the kernels run.
SLUICE_EXPORT std::string why_no_cuda_code(int ordinal = 0);
// Returns a text such as "NVIDIA H200, compute capability 9.0, 139.8 GiB".
// Requires: `ordinal` is less than cuda_device_count().
SLUICE_EXPORT std::string describe_cuda_device(int ordinal = 0);

// Fails with:
// - kUnsupported: the GPU cannot be used. The message has why_no_cuda_device().
// - kOutOfMemory: the GPU has less memory than options.memory_bytes.
SLUICE_EXPORT std::unique_ptr<CudaDevice> make_cuda_device(const CudaDeviceOptions& options = {});

}  // namespace sluice
