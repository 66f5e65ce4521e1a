#include "engine/bound/step_cost.h"

#include <algorithm>

namespace sluice {

std::string_view name_of(Resource resource) {
  switch (resource) {
    case Resource::kCompute: return "compute";
    case Resource::kStorageRead: return "storage reads";
    case Resource::kStorageWrite: return "storage writes";
    case Resource::kStorage: return "storage";
    case Resource::kCopyUp: return "copies to the device";
    case Resource::kCopyDown: return "copies from the device";
    case Resource::kCpu: return "optimizer";
    case Resource::kDeviceUpdate: return "optimizer on the device";
    case Resource::kLinks: return "links between ranks";
    case Resource::kHostMemory: return "host memory";
  }
  return "unknown";
}

double update_bytes_per_element(const StateFormat& format) {
  return 2 * format.state_bytes_per_element() + static_cast<double>(format.gradient_bytes());
}

Resource StepCost::scarcest() const {
  return static_cast<Resource>(std::ranges::max_element(busy_s) - busy_s.begin());
}

}  // namespace sluice
