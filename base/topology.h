// The processors and the memory that this process may use, as hwloc and the cgroup report them. The
// first call asks the system, and later calls return the same answer.
#pragma once

#include <climits>
#include <cstdint>
#include <string>

namespace sluice {

struct Topology {
  // The number of processors in the affinity mask, limited by the cgroup's CPU quota; at least 1.
  unsigned granted_cores = 1;
  // The cgroup's CPU quota in whole cores, at least 1; UINT_MAX if there is no quota.
  unsigned quota_cores = UINT_MAX;
  std::uint64_t memory_bytes = 0;  // physical memory, at most the cgroup's limit
  unsigned numa_nodes = 1;
  std::string processor;  // "AMD EPYC 7B13"; empty when unknown
};

const Topology& topology();

// Returns the smaller of `asked` and the number of granted cores, because more threads would only
// delay each other. If `asked` is 0, the result is the number of granted cores.
unsigned granted_threads(unsigned asked);

// Does the same as topology(), but reads the cgroup's limits from other files, for tests.
// `proc_cgroup` replaces /proc/self/cgroup, and `cgroup_root` replaces /sys/fs/cgroup.
// `cgroup_root` has the structure of cgroup v2, or of v1 with one folder per controller. A missing
// file sets no limit.
Topology read_topology(const std::string& proc_cgroup, const std::string& cgroup_root);

}  // namespace sluice
