#include "base/topology.h"

#include <hwloc.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "base/cgroup.h"
#include "base/openmp_places.h"
#include "base/text_file.h"

namespace sluice {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();

struct Limits {
  double cores = std::numeric_limits<double>::infinity();
  std::uint64_t memory_bytes = kUnlimited;
};

// Returns nothing for "max", "-1" (no limit in cgroup v1) or a missing file.
std::optional<std::uint64_t> parse_count(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void apply_quota(Limits& limits, std::string_view quota, std::string_view period) {
  const auto quota_us = parse_count(quota);
  const auto period_us = parse_count(period);
  if (!quota_us || !period_us || *period_us == 0) return;
  limits.cores =
      std::min(limits.cores, static_cast<double>(*quota_us) / static_cast<double>(*period_us));
}

void apply_memory(Limits& limits, std::string_view text) {
  if (const auto bytes = parse_count(text))
    limits.memory_bytes = std::min(limits.memory_bytes, *bytes);
}

void apply_cgroup_folder(Limits& limits, const std::string& folder) {
  const std::string cpu_max = first_line(folder + "/cpu.max");  // "200000 100000", "max 100000"
  const std::size_t space = cpu_max.find(' ');
  if (space != std::string::npos) {
    apply_quota(limits, std::string_view(cpu_max).substr(0, space),
                std::string_view(cpu_max).substr(space + 1));
  }
  apply_quota(limits, first_line(folder + "/cpu.cfs_quota_us"),
              first_line(folder + "/cpu.cfs_period_us"));
  apply_memory(limits, first_line(folder + "/memory.max"));
  apply_memory(limits, first_line(folder + "/memory.high"));  // the kernel slows what is beyond it
  apply_memory(limits, first_line(folder + "/memory.limit_in_bytes"));
}

Limits cgroup_limits(const std::string& proc_cgroup, const std::string& cgroup_root) {
  Limits limits;
  for (const std::string& folder : cgroup_folders(proc_cgroup, cgroup_root, {"cpu", "memory"}))
    apply_cgroup_folder(limits, folder);
  return limits;
}

// Counts the units of hwloc's topology in this process's affinity mask; 0 when hwloc cannot say.
void ask_hwloc(Topology& found, unsigned& usable_cores) {
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return;
  if (hwloc_topology_load(topology) == 0) {
    hwloc_bitmap_t usable = hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology));
    hwloc_bitmap_t bound = hwloc_bitmap_alloc();
    if (hwloc_get_cpubind(topology, bound, HWLOC_CPUBIND_PROCESS) == 0) {
      for (const int processor : openmp_processors())
        hwloc_bitmap_set(bound, static_cast<unsigned>(processor));
      hwloc_bitmap_and(usable, usable, bound);
    }
    usable_cores = static_cast<unsigned>(std::max(0, hwloc_bitmap_weight(usable)));
    hwloc_bitmap_free(bound);
    hwloc_bitmap_free(usable);
    found.numa_nodes =
        static_cast<unsigned>(std::max(1, hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE)));
    if (hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0)) {
      if (const char* model = hwloc_obj_get_info_by_name(package, "CPUModel")) {
        found.processor = model;
      }
    }
  }
  hwloc_topology_destroy(topology);
}

}  // namespace

Topology read_topology(const std::string& proc_cgroup, const std::string& cgroup_root) {
  Topology found;
  unsigned usable_cores = 0;
  ask_hwloc(found, usable_cores);
  if (usable_cores == 0) {
    usable_cores = static_cast<unsigned>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  }
  const Limits limits = cgroup_limits(proc_cgroup, cgroup_root);
  // A quota of 1.5 cores keeps one thread busy; two threads would be stopped half of the time.
  if (limits.cores < UINT_MAX)
    found.quota_cores = std::max(1u, static_cast<unsigned>(limits.cores));
  found.granted_cores = std::min(usable_cores, found.quota_cores);
  const auto physical_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                              static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  found.memory_bytes = std::min(physical_bytes, limits.memory_bytes);
  return found;
}

unsigned granted_threads(unsigned asked) {
  const unsigned granted = topology().granted_cores;
  return asked == 0 ? granted : std::min(asked, granted);
}

const Topology& topology() {
  static const Topology found = read_topology("/proc/self/cgroup", "/sys/fs/cgroup");
  return found;
}

}  // namespace sluice
