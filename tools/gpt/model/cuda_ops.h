// DeviceOps on a GPU: own kernels (device_bodies.h), and cuBLASLt for matrix products where the
// library can be opened. Thread rule: as DeviceOps.
#pragma once

#include <memory>

#include <sluice/cuda_device.h>
#include "tools/gpt/model/device_ops.h"

namespace sluice::gpt {

enum class ProductKernels : std::uint8_t {
  kFast,   // cuBLASLt; where it cannot be opened, plain ones
  kPlain,  // for comparison
};

// `device` must outlive it.
// Fails with: kUnsupported for types that it does not compute with, or when this build has no code
// for the GPU; kOutOfMemory.
std::unique_ptr<DeviceOps> make_cuda_ops(CudaDevice& device, DType type, DType gradient_type,
                                         ProductKernels products = ProductKernels::kFast);

}  // namespace sluice::gpt
