#include "base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace sluice {
namespace {

// Inside a container, `path` may be the host's view and not exist here. The walk then ends at the
// mount, which is the container's own group.
void add_group(std::vector<std::string>& folders, const std::string& mount, std::string path) {
  while (true) {
    folders.push_back(mount + path);
    const std::size_t slash = path.rfind('/');
    if (slash == std::string::npos) return;
    path.resize(slash);
  }
}

}  // namespace

// Lines of /proc/self/cgroup: "0::/user.slice" for v2, "4:cpu,cpuacct:/docker/1f" for v1.
std::vector<std::string> cgroup_folders(const std::string& proc_cgroup,
                                        const std::string& cgroup_root,
                                        std::initializer_list<std::string_view> controllers) {
  std::vector<std::string> folders;
  std::ifstream file(proc_cgroup);
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (names.empty()) {
      add_group(folders, cgroup_root, path);
      continue;
    }
    std::istringstream all(names);
    for (std::string name; std::getline(all, name, ',');) {
      if (std::ranges::count(controllers, name) != 0)
        add_group(folders, cgroup_root + "/" + name, path);
    }
  }
  return folders;
}

}  // namespace sluice
