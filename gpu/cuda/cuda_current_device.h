// Makes a GPU the calling thread's current one. The CUDA runtime uses the current GPU in nearly
// every call, and makes a context there, about half a gigabyte of its memory, even if stream and
// event belong to another GPU. So every call of the runtime has one of these objects around it.
// The destructor restores the former GPU if the process uses it. A GPU without a context is not
// restored: threads have GPU 0 until they choose, and setting that would make the context. On a
// thread that has not chosen, the first object therefore chooses for good, and later ones cost one
// call that checks.
#pragma once

#include <new>

namespace sluice {

class CudaCurrentDevice {
 public:
  // Fails with: as SLUICE_CUDA.
  explicit CudaCurrentDevice(int ordinal);
  // For code that must not throw. `status`, if given, receives the cudaError_t.
  CudaCurrentDevice(int ordinal, std::nothrow_t, int* status = nullptr) noexcept;
  CudaCurrentDevice(const CudaCurrentDevice&) = delete;
  CudaCurrentDevice& operator=(const CudaCurrentDevice&) = delete;
  ~CudaCurrentDevice();

 private:
  int previous_ = 0;
  bool has_changed_ = false;
};

}  // namespace sluice
