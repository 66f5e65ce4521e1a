#include "tools/commands/pci_links.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/text_file.h"
#include "tools/commands/storage_drives.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kCpuSetsMax = 64;  // 65,536 processors
constexpr unsigned kNvidia = 0x10de;
// The upper two bytes of a PCI class: a display controller with and without a screen.
constexpr unsigned kVgaController = 0x0300;
constexpr unsigned k3dController = 0x0302;

template <class Number>
std::optional<Number> leading_number(std::string_view text, int base = 10) {
  if (base == 16 && text.starts_with("0x")) text.remove_prefix(2);
  Number value{};
  std::from_chars_result read{};
  if constexpr (std::is_floating_point_v<Number>) {
    read = std::from_chars(text.data(), text.data() + text.size(), value);
  } else {
    read = std::from_chars(text.data(), text.data() + text.size(), value, base);
  }
  if (read.ec != std::errc{}) return std::nullopt;
  return value;
}

// Beyond the lanes that a device can have, the kernel reports 0 or 255 for "unknown".
unsigned lane_count(const fs::path& file) {
  const unsigned lanes = leading_number<unsigned>(first_line(file)).value_or(0);
  return lanes <= 32 ? lanes : 0;
}

// "0000:3b:00.0"
bool is_address(const std::string& name) {
  constexpr std::string_view kForm = "xxxx:xx:xx.x";
  return name.size() == kForm.size() && std::ranges::equal(name, kForm, [](char given, char form) {
           return form == 'x' ? std::isxdigit(static_cast<unsigned char>(given)) != 0
                              : given == form;
         });
}

// In the kernel's tree, a device lies below the bridges that lead to it: a port of the processor,
// and with a switch, the port up from the switch and the one down to the device.
std::string switch_above(const fs::path& device) {
  std::error_code error;
  const fs::path place = fs::canonical(device, error);
  if (error) return "";
  std::vector<std::string> bridges;
  for (const fs::path& part : place.parent_path())
    if (is_address(part.string())) bridges.push_back(part.string());
  return bridges.size() < 3 ? "" : bridges[bridges.size() - 2];
}

PciLink read_link(const fs::path& device, std::string name, bool is_gpu) {
  PciLink link;
  link.name = std::move(name);
  link.address = device.filename();
  link.is_gpu = is_gpu;
  const std::optional<int> node = leading_number<int>(first_line(device / "numa_node"));
  if (node && *node >= 0) link.node = node;
  // "16.0 GT/s PCIe", "Unknown"
  link.gigatransfers =
      leading_number<double>(first_line(device / "current_link_speed")).value_or(0);
  link.gigatransfers_max =
      leading_number<double>(first_line(device / "max_link_speed")).value_or(0);
  link.lanes = lane_count(device / "current_link_width");
  link.lanes_max = lane_count(device / "max_link_width");
  link.pci_switch = switch_above(device);
  return link;
}

bool is_pci_device(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / "vendor", error) && fs::exists(folder / "class", error);
}

void add_gpus(const std::string& sysfs, std::vector<PciLink>& found) {
  std::error_code error;
  for (fs::directory_iterator entry(fs::path(sysfs) / "bus/pci/devices", error), end;
       !error && entry != end; entry.increment(error)) {
    const fs::path& device = entry->path();
    const unsigned vendor = leading_number<unsigned>(first_line(device / "vendor"), 16).value_or(0);
    const unsigned kind =
        leading_number<unsigned>(first_line(device / "class"), 16).value_or(0) >> 8;
    if (vendor == kNvidia && (kind == kVgaController || kind == k3dController))
      found.push_back(read_link(device, "GPU " + device.filename().string(), /*is_gpu=*/true));
  }
  std::ranges::sort(found, {}, &PciLink::address);
}

// A drive's folder lies below that of its PCI device. With several paths to it, as NVMe over
// fabrics has them, the kernel puts it below no device, and there is no one link.
void add_drive(const StorageDrive& drive, std::vector<PciLink>& found) {
  const auto is_same = [&](const PciLink& other) { return other.name == drive.name; };
  if (std::ranges::any_of(found, is_same)) return;
  for (fs::path folder = drive.device; folder.has_relative_path(); folder = folder.parent_path())
    if (is_pci_device(folder)) {
      found.push_back(read_link(folder, drive.name, /*is_gpu=*/false));
      return;
    }
}

// A list of processors, "0-3,8", against those of this process.
bool has_usable(std::string_view list, const std::vector<cpu_set_t>& usable) {
  while (!list.empty()) {
    const std::string_view range = list.substr(0, list.find(','));
    list.remove_prefix(std::min(list.size(), range.size() + 1));
    const std::optional<unsigned> first = leading_number<unsigned>(range);
    if (!first) continue;
    const std::size_t dash = range.find('-');
    const unsigned last = dash == std::string_view::npos
                              ? *first
                              : leading_number<unsigned>(range.substr(dash + 1)).value_or(*first);
    for (unsigned cpu = *first; cpu <= last && cpu / CPU_SETSIZE < usable.size(); ++cpu)
      if (CPU_ISSET_S(cpu, usable.size() * sizeof(cpu_set_t), usable.data())) return true;
  }
  return false;
}

}  // namespace

std::vector<PciLink> pci_links(const std::vector<std::string>& folders, const std::string& sysfs) {
  std::vector<PciLink> found;
  add_gpus(sysfs, found);
  for (const std::string& folder : folders)
    for (const StorageDrive& drive : storage_drives(folder, sysfs)) add_drive(drive, found);
  return found;
}

std::vector<int> usable_nodes(const std::string& sysfs) {
  std::vector<int> nodes;
  // The call fails while the set is smaller than the kernel's.
  std::vector<cpu_set_t> usable(1);
  while (::sched_getaffinity(0, usable.size() * sizeof(cpu_set_t), usable.data()) != 0) {
    if (usable.size() == kCpuSetsMax) return nodes;
    usable.resize(2 * usable.size());
  }
  std::error_code error;
  for (fs::directory_iterator entry(fs::path(sysfs) / "devices/system/node", error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (!name.starts_with("node")) continue;
    const std::optional<int> node = leading_number<int>(std::string_view(name).substr(4));
    if (node && has_usable(first_line(entry->path() / "cpulist"), usable)) nodes.push_back(*node);
  }
  std::ranges::sort(nodes);
  return nodes;
}

}  // namespace sluice
