// Makes a GPU the current GPU of the calling thread. The CUDA runtime uses the current GPU in
// nearly every call. The runtime makes a context on the current GPU. A context takes about half a
// gigabyte of GPU memory. The runtime makes the context even if stream and event belong to another
// GPU. So every call of the runtime is made inside the lifetime of a CudaCurrentDevice.
// The destructor restores the former GPU if the process has used that GPU before. The destructor
// does not restore a GPU without a context, because setting the GPU would make a context. Threads
// have GPU 0 until they choose a GPU. So if a thread has not chosen a GPU before, the choice of the
// first object stays. For later objects, the cost is one call that checks the current GPU.
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
