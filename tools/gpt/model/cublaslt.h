// Matrix products by cuBLASLt. The library is opened at run time, so a program with this class
// starts on machines without cuBLASLt. Products with bf16 factors are summed in fp32. Products with
// fp32 factors are computed entirely in fp32, without TF32. The library's heuristic chooses an
// algorithm once for each description of a product: extents, strides, the size of the batch and the
// alignment of the addresses. The choice is kept, so that products with the same description and
// the same factors have the same bits. With another description, the same sums may have other bits.
//
// Thread rule: one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include <sluice/cuda_device.h>
#include "tools/gpt/model/device_ops.h"

namespace sluice::gpt {

class CublasLt {
 public:
  // Returns the reason why cuBLASLt cannot be used. The result is empty if cuBLASLt can be used.
  static std::string why_not();

  // The constructor allocates 32 MiB of device memory. `device` must outlive the object.
  // Fails with kUnsupported if cuBLASLt cannot be used; the message is why_not(). Fails with
  // kOutOfMemory if the device has too little memory.
  explicit CublasLt(CudaDevice& device);
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;
  ~CublasLt();

  std::string version() const;

  // `type` is the type of the factors. If the library knows no algorithm for the product, the call
  // returns false and enqueues nothing. For example, there may be no algorithm for bf16 factors at
  // unaligned addresses.
  // Fails with kInternal if a call of cuBLASLt fails.
  bool multiply(const Product& product, DType type, StreamId stream);

 private:
  struct Plan;

  const Plan& plan_of(const Product& product, DType type);

  CudaDevice& device_;
  DeviceBuffer workspace_;
  void* handle_ = nullptr;
  std::map<std::string, std::unique_ptr<Plan>> plans_;
};

}  // namespace sluice::gpt
