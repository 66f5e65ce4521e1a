// Makes a GPU the calling thread's current one: the CUDA runtime goes by it in nearly every call,
// and makes a context on it, about half a gigabyte of its memory, though stream and event belong to
// another GPU. So each call of the runtime has one of these around it.
// What was current before comes back with the end of this, if it is a GPU that the process uses. A
// GPU without a context is none: threads have GPU 0 until they choose, and setting that would make
// the context. On a thread that has not chosen, the first of these so chooses for good, and the
// next ones cost one call that looks.
#pragma once

#include <new>

namespace sluice {

class CudaCurrentDevice {
 public:
  // Fails with: as SLUICE_CUDA.
  explicit CudaCurrentDevice(int ordinal);
  // For those who may not throw. `status`, if any, becomes the cudaError_t.
  CudaCurrentDevice(int ordinal, std::nothrow_t, int* status = nullptr) noexcept;
  CudaCurrentDevice(const CudaCurrentDevice&) = delete;
  CudaCurrentDevice& operator=(const CudaCurrentDevice&) = delete;
  ~CudaCurrentDevice();

 private:
  int previous_ = 0;
  bool has_changed_ = false;
};

}  // namespace sluice
