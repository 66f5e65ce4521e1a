// The PCIe links of GPUs and drives, and the NUMA nodes to which these devices are attached. The
// data comes from the kernel. A run becomes slower, without an error message, if a device does not
// use all of the device's lanes. A run also becomes slower if a drive and the GPU are attached to
// different sockets.
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
  double gigatransfers = 0;      // current transfer rate per lane; 0 = not reported
  double gigatransfers_max = 0;  // the highest rate of the device
  unsigned lanes = 0;            // the lanes in use; 0 = not reported
  unsigned lanes_max = 0;        // the lanes that the device has
  // The address of the PCIe switch to which the device is attached. The address of a switch is the
  // address of the switch's upstream port. The text is empty if there is no switch, or if the
  // kernel does not report a switch. A transfer between two devices at the same switch need not
  // pass through the processor.
  std::string pci_switch = {};
};

// Returns the PCIe links of NVIDIA's GPUs, and of the drives behind `folders`. Each device is
// listed once. `sysfs` is the folder in which the kernel describes devices, such as "/sys".
std::vector<PciLink> pci_links(const std::vector<std::string>& folders, const std::string& sysfs);

// Returns the NUMA nodes whose processors this process may use. The nodes are in ascending order.
// The result is empty if the kernel does not report NUMA nodes.
std::vector<int> usable_nodes(const std::string& sysfs);

}  // namespace sluice
