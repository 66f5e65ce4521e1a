// The place of a GPU in its machine. The place has two parts: the PCI address of the GPU, and the
// processors of the GPU's NUMA node. The Linux kernel reports these processors. Thread rule: any
// thread may call the functions.
#pragma once

#include <string>

namespace sluice {

// Returns the address of GPU `ordinal` in the kernel's notation ("0000:3b:00.0"). The result is
// empty if the address is not known.
std::string cuda_pci_address(int ordinal);
// Returns the processors near the device at `pci_address`, in the kernel's notation ("0-15,32-47").
// The result is empty if the kernel reports no processors. `sysfs` is the folder at which the
// kernel's sysfs is mounted.
std::string processors_near(const std::string& pci_address, const std::string& sysfs = "/sys");
// If several processes share the machine, the call restricts this process to the processors near
// GPU `ordinal` (NumaNodes::stay_near()). Each of these processes has its own GPU. A process that
// is alone on the machine is not restricted, and may use the processors and the memory of all
// nodes. Returns whether the process is restricted.
bool stay_near_gpu(int ordinal, unsigned processes_of_machine, const std::string& sysfs = "/sys");

}  // namespace sluice
