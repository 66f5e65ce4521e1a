// Makes a GPU the current GPU of the calling thread. The CUDA runtime uses the current GPU in
// nearly every call. The runtime makes a context on the current GPU. A context takes about half a
// gigabyte of GPU memory. The runtime makes the context even if the stream and the event of the
// call belong to another GPU. So every call of the runtime is made during the lifetime of a
// CudaCurrentDevice.
// The destructor restores the former GPU if the process has used that GPU before. The destructor
// does not select a GPU without a context, because the runtime would then make a context. GPU 0 is
// a thread's current GPU until the thread chooses a GPU. If GPU 0 has no context, the destructor of
// a thread's first object does not select GPU 0 again. So the GPU of the first object stays
// current. Each later object then costs only one call, which checks the current GPU.
#pragma once

#include <new>

namespace sluice {

class CudaCurrentDevice {
 public:
  // Fails with the errors of SLUICE_CUDA.
  explicit CudaCurrentDevice(int ordinal);
  // This constructor is for code that must not throw. If `status` is given, the constructor sets
  // `*status` to the cudaError_t.
  CudaCurrentDevice(int ordinal, std::nothrow_t, int* status = nullptr) noexcept;
  CudaCurrentDevice(const CudaCurrentDevice&) = delete;
  CudaCurrentDevice& operator=(const CudaCurrentDevice&) = delete;
  ~CudaCurrentDevice();

 private:
  int previous_ = 0;
  bool has_changed_ = false;
};

}  // namespace sluice
