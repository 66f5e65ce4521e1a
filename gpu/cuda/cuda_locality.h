// The place of a GPU in its machine: its PCI address, and the processors of its NUMA node as the
// kernel tells them. Thread rule: any thread.
#pragma once

#include <string>

namespace sluice {

// The address of GPU `ordinal` as the kernel writes it, "0000:3b:00.0"; empty if it is not known.
std::string cuda_pci_address(int ordinal);
// The processors near the device at `pci_address`, in the kernel's notation ("0-15,32-47"); empty
// if the kernel does not tell. `sysfs` is the root of the kernel's tree.
std::string processors_near(const std::string& pci_address, const std::string& sysfs = "/sys");
// Keeps this process near GPU `ordinal` (NumaNodes::stay_near()). Returns whether it does: one of
// several processes of a machine, each of which has a GPU of its own. A process alone has a use for
// the processors and the memory of all nodes.
bool stay_near_gpu(int ordinal, unsigned processes_of_machine, const std::string& sysfs = "/sys");

}  // namespace sluice
