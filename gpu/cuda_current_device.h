// Makes a GPU the calling thread's current one for as long as this lives; the application may have
// another. Only some calls of the CUDA runtime go by it: allocations, creation of streams and
// events, kernel launches.
#pragma once

namespace sluice {

class CudaCurrentDevice {
 public:
  // Fails with: as SLUICE_CUDA.
  explicit CudaCurrentDevice(int ordinal);
  CudaCurrentDevice(const CudaCurrentDevice&) = delete;
  CudaCurrentDevice& operator=(const CudaCurrentDevice&) = delete;
  ~CudaCurrentDevice();

 private:
  int previous_ = 0;
  bool has_changed_ = false;
};

}  // namespace sluice
