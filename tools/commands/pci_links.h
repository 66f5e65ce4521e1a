// The PCIe links of GPUs and drives, and the NUMA nodes to which these devices are attached. The
// data comes from the kernel. A device may use fewer lanes than it could, or a drive may be
// attached to another socket than the GPU. Either one makes a run slower, and no error is reported.
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
  // The address of the PCIe switch to which the device is attached. This address is that of the
  // switch's upstream port. It is empty if there is no switch, or if the kernel reports none.
  // Transfers between two devices at one switch need not pass through the processor.
  std::string pci_switch = {};
};

// Returns the links of NVIDIA's GPUs, and of the PCI devices of the drives behind `folders`. Each
// device is listed once. `sysfs` is the folder in which the kernel describes devices, "/sys".
std::vector<PciLink> pci_links(const std::vector<std::string>& folders, const std::string& sysfs);

// Returns the NUMA nodes whose processors this process may use, in ascending order. The result is
// empty if the kernel does not report these nodes.
std::vector<int> usable_nodes(const std::string& sysfs);

}  // namespace sluice
