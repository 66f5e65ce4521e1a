// The drives behind a folder, and the write caches of these drives. The kernel provides this data.
// The kind of cache decides whether written data survives a power cut before a flush. The kind of
// cache also decides whether the kernel sends flushes to the drive.
//
// Thread rule: any thread.
#pragma once

#include <string>
#include <vector>

namespace sluice {

struct StorageDrive {
  std::string name;         // "nvme0n1"
  std::string device;       // the drive's folder in the kernel's tree
  std::string write_cache;  // "write back", "write through"; empty = not reported
};

// Returns the drives that contain the file system of `folder`. The list has several drives for RAID
// and similar arrays. The list is empty for tmpfs and network mounts. `sysfs` is the folder in
// which the kernel describes devices, such as "/sys".
std::vector<StorageDrive> storage_drives(const std::string& folder, const std::string& sysfs);

}  // namespace sluice
