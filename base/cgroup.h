// Finds the control groups of this process as folders of the file system. The function reads files,
// and is otherwise pure.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Returns the folders that hold this process's limits for any of `controllers` ("cpu", "memory").
// The folder of the process's own group comes first. The folders of the ancestor groups follow,
// because the limits of these groups apply, too. Under cgroup version 2, all controllers share one
// folder. Under version 1, each controller has its own hierarchy of folders. The list covers both
// versions. The two versions use different file names, so a caller looks in each folder for the
// files of both versions. Some folders in the list may not exist. `proc_cgroup` is
// /proc/self/cgroup, and `cgroup_root` is /sys/fs/cgroup.
std::vector<std::string> cgroup_folders(const std::string& proc_cgroup,
                                        const std::string& cgroup_root,
                                        std::initializer_list<std::string_view> controllers);

}  // namespace sluice
