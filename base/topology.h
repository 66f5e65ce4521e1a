// What this process may use of the machine, asked from hwloc and the cgroup. Read once; pure
// afterwards.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

struct Topology {
  unsigned granted_cores =
      1;  // processing units in the affinity mask, bounded by the cgroup's CPU quota
  std::uint64_t memory_bytes = 0;  // physical memory, bounded by the cgroup's limit
  unsigned numa_nodes = 1;
  std::string processor;  // "AMD EPYC 7B13"; empty when unknown
};

const Topology& topology();

}  // namespace sluice
