// The processors and memory that this process may use, asked from hwloc and the cgroup. Read once;
// pure afterwards.
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

// Returns `asked`, but no more than the granted cores: further threads would only stop each other.
// 0 asks for all cores.
unsigned granted_threads(unsigned asked);

// As topology(), but with the cgroup's limits from other files, for tests: `proc_cgroup` stands for
// /proc/self/cgroup, `cgroup_root` for /sys/fs/cgroup (v2, or v1 with a folder per controller). A
// missing file sets no limit.
Topology read_topology(const std::string& proc_cgroup, const std::string& cgroup_root);

}  // namespace sluice
