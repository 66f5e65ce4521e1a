// The functions make DeviceOps for a GPU. The kernels are this project's own kernels
// (device_bodies.h). Matrix products use cuBLASLt if the library can be opened.
// Thread rule: as for DeviceOps.
#pragma once

#include <memory>

#include <sluice/cuda_device.h>
#include "tools/gpt/model/device_ops.h"

namespace sluice::gpt {

enum class ProductKernels : std::uint8_t {
  kFast,   // by cuBLASLt, or by plain kernels if cuBLASLt cannot be opened
  kPlain,  // by plain kernels, for comparison
};

// `device` must outlive the result.
// Fails with kUnsupported if the kernels do not support the types, or if this build has no code for
// the GPU. Fails with kOutOfMemory if the GPU has too little memory.
std::unique_ptr<DeviceOps> make_cuda_ops(CudaDevice& device, DType type, DType gradient_type,
                                         ProductKernels products = ProductKernels::kFast);

}  // namespace sluice::gpt
