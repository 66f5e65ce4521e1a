#include "gpu/cuda/kernel_list.h"

#include <vector>

#include "gpu/cuda/cuda_current_device.h"

namespace sluice {
namespace {

// Made when the first kernel is listed.
std::vector<EmptyLaunch>& list() {
  static std::vector<EmptyLaunch> kernels;
  return kernels;
}

}  // namespace

ListedKernel::ListedKernel(EmptyLaunch launch) {
  list().push_back(launch);
}

std::span<const EmptyLaunch> listed_kernels() {
  return list();
}

void load_kernels(CudaDevice& device) {
  const CudaCurrentDevice current(device.ordinal());
  const Stream stream(device, "loading kernels");
  for (const EmptyLaunch launch : listed_kernels()) launch(device.native_stream(stream.id()));
  device.synchronize(stream.id());
}

}  // namespace sluice
