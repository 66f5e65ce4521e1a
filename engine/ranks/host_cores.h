// The cores that a rank takes, of those that it shares with the other ranks of its host.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

// The system's files. Tests replace the folders.
struct HostFiles {
  std::string proc = "/proc";
  std::string cgroups = "/sys/fs/cgroup";
};

// Returns how many cores the launcher of this process may use on this host. The launcher is the
// nearest ancestor whose environment lacks `rank_variable`: wrappers of the rank have it. A
// launcher may bind every rank to cores of the rank's own, but is not bound itself. The result is 0
// if no ancestor can be seen.
unsigned cores_of_launcher(const std::string& rank_variable, const HostFiles& files = {});

// Returns how many of `launcher_cores` one of `host_ranks` ranks takes: an equal part, but no more
// than its own affinity mask, of `mask` cores, has. The ranks of a host also share the CPU quota of
// `quota` cores (UINT_MAX: none). The result is at least 1.
unsigned share_of_cores(unsigned launcher_cores, unsigned mask, unsigned quota,
                        std::uint32_t host_ranks);

// Returns the share of this process, which is one of `host_ranks` ranks of its host.
unsigned own_share_of_cores(const std::string& rank_variable, std::uint32_t host_ranks);

}  // namespace sluice
