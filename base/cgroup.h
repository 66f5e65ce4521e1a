// The control groups that this process is in, as folders of the file system. Reads files, and is
// pure otherwise.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Returns the folders that hold the limits of one of `controllers` ("cpu", "memory"): first that of
// the process's own group, then those of its ancestors, whose limits bind as well. Covers cgroup
// version 2, where all controllers share a folder, and version 1, where each has its own hierarchy.
// File names differ between the two versions, so looking for all of them in each folder is safe; a
// folder may not exist. `proc_cgroup` is /proc/self/cgroup, `cgroup_root` is /sys/fs/cgroup.
std::vector<std::string> cgroup_folders(const std::string& proc_cgroup,
                                        const std::string& cgroup_root,
                                        std::initializer_list<std::string_view> controllers);

}  // namespace sluice
