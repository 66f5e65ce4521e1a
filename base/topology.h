// What this process may use of the machine, asked from hwloc and the cgroup. Read once; pure
// afterwards.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

struct Topology {
  // Processing units in the affinity mask, bounded by the cgroup's CPU quota; at least 1.
  unsigned granted_cores = 1;
  std::uint64_t memory_bytes = 0;  // physical memory, bounded by the cgroup's limit
  unsigned numa_nodes = 1;
  std::string processor;  // "AMD EPYC 7B13"; empty when unknown
};

const Topology& topology();

// As many threads as asked for, but no more than cores are granted: further ones would only stop
// each other. 0 asks for all.
unsigned granted_threads(unsigned asked);

// As topology(), with the cgroup's limits from other files, for tests: `proc_cgroup` in the form of
// /proc/self/cgroup, `cgroup_root` in that of /sys/fs/cgroup (v2, or v1 with a folder a
// controller). A file that is missing limits nothing.
Topology read_topology(const std::string& proc_cgroup, const std::string& cgroup_root);

}  // namespace sluice
