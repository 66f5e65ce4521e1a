#include "engine/ranks/host_cores.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "base/cgroup.h"
#include "base/text_file.h"
#include "base/topology.h"

namespace sluice {
namespace {

using Cores = std::set<unsigned>;

// A list of the kernel, such as "0-3,8".
Cores parse_cores(std::string_view text) {
  Cores cores;
  while (!text.empty()) {
    unsigned first = 0;
    auto end = std::from_chars(text.data(), text.data() + text.size(), first);
    unsigned last = first;
    if (end.ec == std::errc{} && end.ptr != text.data() + text.size() && *end.ptr == '-')
      end = std::from_chars(end.ptr + 1, text.data() + text.size(), last);
    if (end.ec != std::errc{}) return cores;
    for (unsigned core = first; core <= last; ++core) cores.insert(core);
    text.remove_prefix(static_cast<std::size_t>(end.ptr - text.data()));
    text = text.substr(std::min(text.size(), text.find_first_not_of(", \t")));
  }
  return cores;
}

// The kernel's words of a process; empty for one that cannot be seen.
struct Process {
  std::string parent;
  Cores mask;
};
Process process_of(const HostFiles& files, const std::string& id) {
  Process process;
  std::ifstream status(files.proc + "/" + id + "/status");
  for (std::string line; std::getline(status, line);) {
    const std::size_t value = line.find_first_not_of(" \t", line.find(':') + 1);
    if (value == std::string::npos) continue;
    if (line.starts_with("PPid:")) process.parent = line.substr(value);
    if (line.starts_with("Cpus_allowed_list:")) process.mask = parse_cores(line.substr(value));
  }
  return process;
}

// False also for a process of another user, as Slurm's own is.
bool is_started_with(const HostFiles& files, const std::string& id, const std::string& variable) {
  std::ifstream environment(files.proc + "/" + id + "/environ", std::ios::binary);
  for (std::string entry; std::getline(environment, entry, '\0');)
    if (entry.starts_with(variable + "=")) return true;
  return false;
}

// The cores that this process's control groups allow. The affinity mask of the launcher may have
// more, because the launcher may be in other groups.
std::optional<Cores> cores_of_groups(const HostFiles& files) {
  for (const std::string& folder :
       cgroup_folders(files.proc + "/self/cgroup", files.cgroups, {"cpuset"}))
    for (const char* name : {"cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"})
      if (const Cores cores = parse_cores(first_line(folder + "/" + name)); !cores.empty())
        return cores;
  return std::nullopt;
}

}  // namespace

unsigned cores_of_launcher(const std::string& rank_variable, const HostFiles& files) {
  Cores cores;
  std::string id = process_of(files, "self").parent;
  while (!id.empty() && id != "0") {
    const Process process = process_of(files, id);
    if (process.mask.empty()) break;  // it cannot be seen
    cores = process.mask;
    if (!is_started_with(files, id, rank_variable)) break;
    id = process.parent;
  }
  if (const std::optional<Cores> allowed = cores_of_groups(files))
    std::erase_if(cores, [&](unsigned core) { return !allowed->contains(core); });
  return static_cast<unsigned>(cores.size());
}

unsigned share_of_cores(unsigned launcher_cores, unsigned mask, unsigned quota,
                        std::uint32_t host_ranks) {
  const unsigned shared = std::min(std::max(launcher_cores, mask), quota);
  return std::clamp(shared / std::max(1u, host_ranks), 1u, std::max(1u, std::min(mask, quota)));
}

unsigned own_share_of_cores(const std::string& rank_variable, std::uint32_t host_ranks) {
  const auto mask = static_cast<unsigned>(process_of({}, "self").mask.size());
  return share_of_cores(cores_of_launcher(rank_variable), mask, topology().quota_cores, host_ranks);
}

}  // namespace sluice
