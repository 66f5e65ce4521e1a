// These functions choose a device's DeviceMath by the kind of the device. These functions are not
// in gpu/math, because gpu/math does not depend on CUDA. Thread rule: the same as for DeviceMath.
#pragma once

#include <memory>

#include <sluice/cuda_device.h>
#include <sluice/device.h>
#include "gpu/math/device_math.h"

namespace sluice {

// In this function and the next function, `device` must outlive the result.
// Fails with kUnsupported if this build has no code for the GPU.
std::unique_ptr<DeviceMath> make_cuda_math(CudaDevice& device);
// Makes the DeviceMath that `device` needs. On the host device, a single thread computes one
// element after another.
// Fails with kInvalidArgument if the device is neither a GPU nor the host.
std::unique_ptr<DeviceMath> make_device_math(Device& device);

}  // namespace sluice
