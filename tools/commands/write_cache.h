// The write caches of the drives behind a folder, as the kernel reports them: whether what a drive
// has taken survives a power cut before a flush, and whether the kernel flushes at all.
//
// Thread rule: any thread.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct DriveCache {
  std::string drive;  // "nvme0n1"
  std::string mode;   // "write back", "write through"; empty: the kernel says nothing
};

// The drives of the file system of `folder`: several for RAID and the like, none for tmpfs or a
// network mount. `sysfs` is where the kernel's tree lies: "/sys".
std::vector<DriveCache> drive_caches(const std::string& folder, const std::string& sysfs);

}  // namespace sluice
