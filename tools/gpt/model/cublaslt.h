// Matrix products by cuBLASLt, a library that is opened at run time: a program with this in it
// starts without it. bf16 products accumulate in fp32; fp32 products are fp32 throughout (no TF32).
// An algorithm is chosen once for each shape, by the library's heuristic, and kept, so that the
// same product gives the same bits.
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
  // Why there is none; empty when there is one.
  static std::string why_not();

  // Takes 32 MiB of device memory. `device` must outlive it.
  // Fails with: kUnsupported with why_not(), kOutOfMemory.
  explicit CublasLt(CudaDevice& device);
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;
  ~CublasLt();

  std::string version() const;

  // `type` is T. False, and nothing enqueued, when the library knows no algorithm for the product
  // (bf16 at odd addresses, perhaps).
  // Fails with: kInternal.
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
