#include "gpu/math/device_math.h"

#include <sluice/error.h>
#include "gpu/math/device_math_over.h"
#include "gpu/math/host_launcher.h"

namespace sluice {

std::unique_ptr<DeviceMath> make_device_math(Device& device) {
  if (auto* const cuda = dynamic_cast<CudaDevice*>(&device)) return make_cuda_math(*cuda);
  auto* const host = dynamic_cast<HostDevice*>(&device);
  SLUICE_CHECK(host != nullptr, "a device is a GPU or the host");
  return std::make_unique<DeviceMathOver<HostLauncher>>(HostLauncher(*host));
}

}  // namespace sluice
