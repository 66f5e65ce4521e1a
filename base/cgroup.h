// The control groups that this process is in, as folders of the file system. Pure but for the files
// that it reads.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// The folders that hold the limits of one of `controllers` ("cpu", "memory"): of the process's own
// group first, then of its ancestors, whose limits bind as well. Of version 2, where all
// controllers have one folder, and of version 1, with a hierarchy for each. The files of the two
// differ in name, so looking for all of them in each folder is safe; a folder may not exist.
// `proc_cgroup` is /proc/self/cgroup, `cgroup_root` /sys/fs/cgroup.
std::vector<std::string> cgroup_folders(const std::string& proc_cgroup,
                                        const std::string& cgroup_root,
                                        std::initializer_list<std::string_view> controllers);

}  // namespace sluice
