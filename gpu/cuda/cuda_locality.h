// The place of a GPU in its machine. The place consists of the GPU's PCI address, and of the
// processors of its NUMA node. The kernel reports these processors. Thread rule: any thread.
#pragma once

#include <string>

namespace sluice {

// Returns the address of GPU `ordinal` as the kernel writes addresses ("0000:3b:00.0"). The result
// is empty if the address is not known.
std::string cuda_pci_address(int ordinal);
// Returns the processors near the device at `pci_address`, in the kernel's notation ("0-15,32-47").
// The result is empty if the kernel reports no processors. `sysfs` is the root of the kernel's
// tree.
std::string processors_near(const std::string& pci_address, const std::string& sysfs = "/sys");
// Restricts this process to the processors near GPU `ordinal` (NumaNodes::stay_near()), if several
// processes share the machine and each process has its own GPU. A process that is alone is not
// restricted, because it can use the processors and the memory of all nodes. Returns whether the
// process is restricted.
bool stay_near_gpu(int ordinal, unsigned processes_of_machine, const std::string& sysfs = "/sys");

}  // namespace sluice
