// The drives behind a folder, as the kernel reports them, and their write caches. The caches decide
// whether written data survives a power cut before a flush, and whether the kernel sends flushes to
// the drives.
//
// Thread rule: any thread.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct StorageDrive {
  std::string name;         // "nvme0n1"
  std::string device;       // its folder in the kernel's tree
  std::string write_cache;  // "write back", "write through"; empty = not reported
};

// Returns the drives of the file system of `folder`. RAID and similar arrays have several drives.
// Tmpfs and network mounts have no drives. `sysfs` is the root of the kernel's tree, "/sys".
std::vector<StorageDrive> storage_drives(const std::string& folder, const std::string& sysfs);

}  // namespace sluice
