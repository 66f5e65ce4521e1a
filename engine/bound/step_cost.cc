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
  // fp16 parameters are made from their masters, and not read.
  const std::uint64_t not_read =
      format.master == MasterLayout::kFp16 ? format.parameter_bytes() : 0;
  return 2 * format.state_bytes_per_element() + static_cast<double>(format.gradient_bytes()) -
         static_cast<double>(not_read);
}

Resource StepCost::scarcest() const {
  return static_cast<Resource>(std::ranges::max_element(busy_s) - busy_s.begin());
}

}  // namespace sluice
