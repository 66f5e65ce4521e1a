// Matrix products by cuBLASLt. The library is opened at run time, so a program with this class
// starts on machines without cuBLASLt. bf16 products accumulate in fp32; fp32 products are fp32
// throughout (no TF32). The library's heuristic chooses an algorithm once for each shape. The
// choice is kept, so that the same product gives the same bits.
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
  // Why cuBLASLt cannot be used; empty when it can.
  static std::string why_not();

  // Takes 32 MiB of device memory. `device` must outlive it.
  // Fails with: kUnsupported with why_not(), kOutOfMemory.
  explicit CublasLt(CudaDevice& device);
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;
  ~CublasLt();

  std::string version() const;

  // `type` is T. Returns false and enqueues nothing when the library knows no algorithm for the
  // product (perhaps for bf16 at odd addresses).
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
