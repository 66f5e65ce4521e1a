// The PCIe links of GPUs and drives, and the NUMA nodes to which they are attached, as the kernel
// reports them. A device may use fewer lanes than it could, or may be attached to another socket
// than the GPU. This slows down a run without any error.
//
// Thread rule: any thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace sluice {

struct PciLink {
  std::string name;     // "GPU 0000:3b:00.0", "nvme0n1"
  std::string address;  // "0000:3b:00.0"
  bool is_gpu = false;
  std::optional<int> node;       // the NUMA node; none = not reported
  double gigatransfers = 0;      // per second and lane now; 0 = not reported
  double gigatransfers_max = 0;  // of the device
  unsigned lanes = 0;            // now; 0 = not reported
  unsigned lanes_max = 0;        // of the device
  // The address of the PCIe switch that the device hangs on, which is that of the port that leads
  // up from the switch. Empty: none, or not reported. Bytes between two devices of one switch need
  // not pass the processor.
  std::string pci_switch = {};
};

// Returns NVIDIA's GPUs, and the PCI devices of the drives behind `folders`. Each device is listed
// once. `sysfs` is the root of the kernel's tree, "/sys".
std::vector<PciLink> pci_links(const std::vector<std::string>& folders, const std::string& sysfs);

// Returns the NUMA nodes whose processors this process may use, in ascending order. The result is
// empty if the kernel does not report these nodes.
std::vector<int> usable_nodes(const std::string& sysfs);

}  // namespace sluice
