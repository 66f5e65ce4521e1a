#include "gpu/cuda/cuda_locality.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cctype>

#include "base/numa.h"
#include "base/text_file.h"

namespace sluice {

std::string cuda_pci_address(int ordinal) {
  std::array<char, 32> text{};
  if (cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), ordinal) != cudaSuccess) {
    (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
    return "";
  }
  std::string address = text.data();
  std::ranges::transform(address, address.begin(), [](char c) {
    return static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  });
  return address;
}

std::string processors_near(const std::string& pci_address, const std::string& sysfs) {
  if (pci_address.empty()) return "";
  return first_line(sysfs + "/bus/pci/devices/" + pci_address + "/local_cpulist");
}

bool stay_near_gpu(int ordinal, unsigned processes_of_machine, const std::string& sysfs) {
  return processes_of_machine > 1 &&
         NumaNodes::stay_near(processors_near(cuda_pci_address(ordinal), sysfs));
}

}  // namespace sluice
