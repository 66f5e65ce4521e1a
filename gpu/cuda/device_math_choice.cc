#include "gpu/cuda/device_math_choice.h"

#include <fmt/format.h>

#include <sluice/error.h>
#include "gpu/math/device_math_over.h"
#include "gpu/math/host_launcher.h"

namespace sluice {

std::unique_ptr<DeviceMath> make_device_math(Device& device) {
  if (auto* const cuda = dynamic_cast<CudaDevice*>(&device)) return make_cuda_math(*cuda);
  if (auto* const host = dynamic_cast<HostDevice*>(&device))
    return std::make_unique<DeviceMathOver<HostLauncher>>(HostLauncher(*host));
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("the device \"{}\" is neither a GPU nor the host, so Sluice has no "
                          "arithmetic for it; use make_host_device() or make_cuda_device()",
                          device.name()));
}

}  // namespace sluice
