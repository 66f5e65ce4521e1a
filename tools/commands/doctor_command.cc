#include "tools/commands/doctor_command.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <sluice/cuda_device.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "base/text_file.h"
#include "base/topology.h"
#include "engine/plan/host_memory.h"
#include "engine/store/missing_promise.h"
#include "gpu/cuda/cuda_environment.h"
#include "gpu/ranks/mpi_collectives.h"
#include "gpu/ranks/nccl_collectives.h"
#include "io/direct_file.h"
#include "io/io_queue.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/option_words.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/pci_links.h"
#include "tools/commands/storage_drives.h"

namespace sluice {
namespace {

constexpr std::uint64_t kFreeBytes = 10_GiB;  // state of a model of 800 M parameters
constexpr long kTmpfsMagic = 0x01021994;
constexpr long kOverlayMagic = 0x794c7630;
constexpr long kNfsMagic = 0x6969;

Finding look_at_uring() {
  Finding finding{.subject = "io_uring", .text = "available", .remedy = ""};
  try {
    (void)make_uring_queue({.depth = 32});
  } catch (const Error& error) {
    const std::string text = error.what();
    const std::size_t end = std::min(text.find("; "), text.size());
    finding.health = Health::kWarn;
    finding.text = text.substr(0, end) + "; storage works with threads instead";
    finding.remedy = text.substr(std::min(end + 2, text.size()));
  }
  return finding;
}

// Whether the kernel holds this process to its limit of locked memory. It does not ask for root,
// but for CAP_IPC_LOCK outside of containers.
bool is_memlock_bound(std::uint64_t limit_bytes) {
  const std::uint64_t bytes = limit_bytes / 4_KiB * 4_KiB + 64_KiB;
  void* beyond = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (beyond == MAP_FAILED) return true;
  const bool is_bound = ::mlock2(beyond, bytes, MLOCK_ONFAULT) != 0;
  ::munmap(beyond, bytes);
  return is_bound;
}

Finding look_at_memlock() {
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool is_unlimited = limit.rlim_cur == RLIM_INFINITY;
  Finding finding{.subject = "locked memory",
                  .text = is_unlimited ? "no limit" : "up to " + format_bytes(limit.rlim_cur),
                  .remedy = ""};
  // Transfer buffers are registered as a whole, and the largest are nearly memory.host.
  const std::uint64_t buffer_bytes = default_host_bytes(topology().memory_bytes);
  if (is_unlimited || limit.rlim_cur >= buffer_bytes) return finding;
  if (!is_memlock_bound(limit.rlim_cur)) {
    finding.text += ", which does not bind this process (CAP_IPC_LOCK)";
    return finding;
  }
  finding.health = Health::kWarn;
  finding.text += fmt::format(
      ": larger buffers are not registered with the kernel, and pinned for each transfer; "
      "memory.host has {} by default",
      format_bytes(buffer_bytes));
  finding.remedy = "ulimit -l unlimited (memlock in /etc/security/limits.conf)";
  return finding;
}

std::string file_system_name(long magic) {
  switch (magic) {
    case 0xef53: return "ext4";
    case 0x58465342: return "XFS";
    case 0x9123683e: return "Btrfs";
    case kTmpfsMagic: return "tmpfs";
    case kOverlayMagic: return "overlay";
    case kNfsMagic: return "NFS";
    default: return fmt::format("file system {:#x}", magic);
  }
}

Finding look_at_path(const std::string& path) {
  Finding finding{.subject = "storage " + path, .text = "", .remedy = ""};
  try {
    const DirectFile file = with_words({{"storage.paths", "--path"}},
                                       [&] { return DirectFile::create_scratch(path, 1_MiB); });
    struct statvfs space {};
    struct statfs system {};
    ::statvfs(path.c_str(), &space);
    ::statfs(path.c_str(), &system);
    const std::uint64_t free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
    finding.text = fmt::format(
        "{}, {} free, {}", file_system_name(system.f_type), format_bytes(free_bytes),
        file.is_direct() ? fmt::format("O_DIRECT with alignment {}", file.alignment_bytes())
                         : "no O_DIRECT: through the page cache");
    const auto warn = [&](const std::string& why, const std::string& remedy) {
      finding.health = Health::kWarn;
      finding.text += "; " + why;
      finding.remedy = remedy;
    };
    if (system.f_type == kTmpfsMagic) {
      warn("this is memory, not a drive", "name a folder on a drive in storage.paths");
    } else if (!file.is_direct()) {
      warn("slow, and it displaces other memory",
           "name a folder on ext4 or XFS on a local drive in storage.paths");
    } else if (!is_aligned(4096, file.alignment_bytes())) {
      finding.health = Health::kFail;
      finding.remedy = "name a path whose file system works with 4 KiB in storage.paths";
    } else if (free_bytes < kFreeBytes) {
      warn("little for a model: 12 bytes per parameter", "free space, or name more storage.paths");
    }
    const std::string missing = missing_promise(path);
    if (system.f_type != kTmpfsMagic && !missing.empty()) {
      finding.text += "; this is " + missing;
      const std::string remedy = "name a folder on a local drive, if storage.state keeps a store";
      finding.remedy += finding.remedy.empty() ? remedy : "; " + remedy;
      if (finding.health == Health::kOk) finding.health = Health::kWarn;
    }
  } catch (const Error& error) {
    finding.health = Health::kFail;
    finding.text = error.what();
    finding.remedy = "name folders that exist and are writable with --path and storage.paths";
  }
  return finding;
}

// Durable stores count on flushes.
Finding look_at_write_caches(const std::string& path, const std::string& sysfs) {
  Finding finding{.subject = "write cache " + path, .text = "", .remedy = ""};
  for (const StorageDrive& drive : storage_drives(path, sysfs)) {
    if (!finding.text.empty()) finding.text += "; ";
    finding.text += drive.name + ": ";
    if (drive.write_cache == "write back") {
      finding.text += "volatile (write back), and flushed by each commit of a durable store";
    } else if (drive.write_cache == "write through") {
      finding.health = Health::kWarn;
      finding.text +=
          "the kernel takes it for a drive without a volatile cache (write through) and sends it "
          "no flushes; if it has one, a power cut loses commits";
      finding.remedy = fmt::format(
          "safe with power-loss protection; without it: echo 'write back' > "
          "/sys/block/{}/queue/write_cache",
          drive.name);
    } else {
      finding.text += "unknown";
    }
  }
  if (finding.text.empty())
    finding.text = "unknown: the kernel names no drive of this machine behind it";
  return finding;
}

Finding look_at_memory() {
  const auto physical_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                              static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t granted_bytes = topology().memory_bytes;
  Finding finding{.subject = "memory", .text = format_bytes(granted_bytes), .remedy = ""};
  if (granted_bytes < physical_bytes) {
    finding.text += fmt::format(" by the cgroup, of {}", format_bytes(physical_bytes));
    if (granted_bytes < physical_bytes / 4) {
      finding.health = Health::kWarn;
      finding.remedy = "raise the container's limit (docker run --memory, systemd MemoryMax)";
    }
  }
  return finding;
}

Finding look_at_cores() {
  const Topology& found = topology();
  Finding finding{.subject = "processor",
                  .text = fmt::format("{} cores granted, {} NUMA node{}", found.granted_cores,
                                      found.numa_nodes, found.numa_nodes == 1 ? "" : "s"),
                  .remedy = ""};
  if (!found.processor.empty()) finding.text = found.processor + ": " + finding.text;
  return finding;
}

// "nvme0n1 (16.0 GT/s x4, switch 0000:02:00.0)"
std::string text_of(const PciLink& link) {
  const std::string place = link.pci_switch.empty() ? "" : ", switch " + link.pci_switch;
  if (link.lanes == 0 || link.gigatransfers == 0)
    return fmt::format("{} (link not reported{})", link.name, place);
  return fmt::format("{} ({:.1f} GT/s x{}{})", link.name, link.gigatransfers, link.lanes, place);
}

void add_problem(Finding& finding, const std::string& problem, const std::string& remedy) {
  finding.health = Health::kWarn;
  finding.text += "; " + problem;
  if (finding.remedy.find(remedy) == std::string::npos)
    finding.remedy += (finding.remedy.empty() ? "" : "; ") + remedy;
}

// A GPU lowers its speed while it has nothing to do, but keeps its lanes.
void look_at_width(const PciLink& link, Finding& finding) {
  if (link.lanes != 0 && link.lanes < link.lanes_max) {
    add_problem(finding,
                fmt::format("{} has {} of its {} lanes", link.name, link.lanes, link.lanes_max),
                "seat it anew, or move it to a slot with all lanes");
  }
  if (!link.is_gpu && link.gigatransfers != 0 && link.gigatransfers < link.gigatransfers_max) {
    add_problem(finding,
                fmt::format("{} runs at {:.1f} of its {:.1f} GT/s", link.name, link.gigatransfers,
                            link.gigatransfers_max),
                "look for a slot or a BIOS setting of its generation");
  }
}

// A run uses one of the GPUs, and each of its drives.
void look_at_nodes(const std::vector<PciLink>& links, const std::vector<int>& usable,
                   Finding& finding) {
  std::set<int> with_gpus;
  for (const PciLink& link : links)
    if (link.is_gpu && link.node) with_gpus.insert(*link.node);
  const auto is_usable = [&](int node) { return std::ranges::find(usable, node) != usable.end(); };
  const bool has_usable_gpu = std::ranges::any_of(with_gpus, is_usable);
  for (const PciLink& link : links) {
    if (!link.node || (link.is_gpu && has_usable_gpu)) continue;
    if (!is_usable(*link.node)) {
      add_problem(finding,
                  fmt::format("this process may not compute on node {}, where {} is", *link.node,
                              link.name),
                  fmt::format("numactl --cpunodebind={} --membind={}", *link.node, *link.node));
    } else if (!link.is_gpu && !with_gpus.empty() && !with_gpus.contains(*link.node)) {
      add_problem(finding,
                  fmt::format("{} is on node {}, and no GPU is there but on {}: its bytes cross "
                              "sockets",
                              link.name, *link.node, fmt::join(with_gpus, ", ")),
                  "name a folder on a drive of the GPU's node in storage.paths");
    }
  }
}

// Says which node each GPU and drive hangs on, where the kernel tells.
Finding look_at_links(const DoctorOptions& options) {
  Finding finding{.subject = "links", .text = "", .remedy = ""};
  const std::vector<PciLink> links = pci_links(options.paths, options.sysfs);
  if (links.empty()) {
    finding.text = "the kernel names no GPU and no drive on PCIe";
    return finding;
  }
  const std::vector<int> usable = usable_nodes(options.sysfs);
  std::map<std::optional<int>, std::vector<std::string>> of_node;
  for (const PciLink& link : links) of_node[link.node].push_back(text_of(link));
  for (const auto& [node, names] : of_node) {
    if (!finding.text.empty()) finding.text += "; ";
    if (node)
      finding.text += fmt::format("node {}: ", *node);
    else if (of_node.size() > 1)
      finding.text += "node unknown: ";
    finding.text += fmt::format("{}", fmt::join(names, ", "));
  }
  for (const PciLink& link : links) look_at_width(link, finding);
  if (!usable.empty()) look_at_nodes(links, usable, finding);
  return finding;
}

Finding look_at_huge_pages() {
  const std::string mode = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  Finding finding{.subject = "huge pages", .text = mode.empty() ? "unknown" : mode, .remedy = ""};
  if (!mode.empty() && mode.find("[never]") == std::string::npos) return finding;
  finding.health = Health::kWarn;
  finding.text += ": buffers on 4 KiB pages halve the rate of a drive";
  finding.remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled";
  return finding;
}

Finding look_at_cuda() {
  Finding finding{.subject = "CUDA", .text = "", .remedy = ""};
  if (const std::string why = why_no_cuda_code(); !why.empty()) {
    const bool is_listed = cuda_device_count() > 0;
    const std::size_t end = is_listed ? std::min(why.find("; "), why.size()) : why.size();
    finding.text = why.substr(0, end) + ": run.device \"auto\" computes on the host";
    if (is_listed) {
      finding.health = Health::kWarn;
      finding.remedy = why.substr(std::min(end + 2, why.size()));
      return finding;
    }
    if (first_line("/proc/driver/nvidia/version").empty()) return finding;
    finding.health = Health::kWarn;
    finding.text += "; yet this machine has an NVIDIA driver";
    finding.remedy =
        "build with SLUICE_CUDA=ON and a driver's libraries in reach; in a container: docker run "
        "--gpus all";
    return finding;
  }
  finding.text = describe_cuda_device() + ": run.device \"auto\" computes there";
  return finding;
}

Finding look_at_cuda_variables() {
  const CudaEnvironment found = look_at_cuda_environment();
  return {.health = found.advice.empty() ? Health::kOk : Health::kWarn,
          .subject = "CUDA environment",
          .text = found.description,
          .remedy = found.advice};
}

// For ranks on GPUs.
Finding look_at_nccl(const std::string& library) {
  if (const std::string why = why_no_nccl(library); !why.empty())
    return {.health = Health::kOk, .subject = "NCCL", .text = why + ": one GPU only", .remedy = ""};
  return {.health = Health::kOk, .subject = "NCCL", .text = describe_nccl(library), .remedy = ""};
}

Finding look_at_mpi(const std::string& library) {
  Finding finding{.subject = "MPI", .text = "no mpirun: one process only", .remedy = ""};
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string launcher = folder + "/mpirun";
    if (::access(launcher.c_str(), X_OK) != 0) continue;
    finding.text = launcher;
    if (const std::string why = why_no_mpi(library); !why.empty()) {
      finding.health = Health::kWarn;
      finding.text += ", but " + why + ": processes cannot train together";
      finding.remedy = "build with SLUICE_MPI=ON, with the package libopenmpi-dev";
    }
    break;
  }
  return finding;
}

std::string json_of(const std::vector<Finding>& findings, bool has_failed) {
  constexpr std::array kNames{"ok", "warn", "fail"};
  nlohmann::ordered_json root = {{"has_failed", has_failed},
                                 {"findings", nlohmann::ordered_json::array()}};
  for (const Finding& finding : findings)
    root["findings"].push_back({{"health", kNames[static_cast<std::size_t>(finding.health)]},
                                {"subject", finding.subject},
                                {"text", finding.text},
                                {"remedy", finding.remedy}});
  return root.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

std::vector<Finding> examine(const DoctorOptions& options) {
  std::vector<Finding> findings{look_at_uring(), look_at_memlock()};
  for (const std::string& path : options.paths) {
    findings.push_back(look_at_path(path));
    findings.push_back(look_at_write_caches(path, options.sysfs));
  }
  for (Finding& finding :
       std::array{look_at_memory(), look_at_cores(), look_at_links(options), look_at_huge_pages(),
                  look_at_cuda(), look_at_cuda_variables(), look_at_mpi(options.mpi_library)})
    findings.push_back(std::move(finding));
  if (why_no_cuda_code().empty()) findings.push_back(look_at_nccl(options.nccl_library));
  return findings;
}

int run_doctor(const DoctorOptions& options) {
  OutputFiles outputs;
  OutputFile& json = outputs.add("--json", options.json_file);
  outputs.check();
  const auto findings = with_progress("examining the machine", [&] { return examine(options); });
  bool has_failed = false;
  for (const Finding& finding : findings) {
    constexpr std::array kNames{"ok  ", "warn", "FAIL"};
    constexpr std::array kColours{Colour::kGood, Colour::kWarning, Colour::kBad};
    const auto health = static_cast<std::size_t>(finding.health);
    say("{}  {}: {}\n", coloured(said_descriptor(), kColours[health], kNames[health]),
        finding.subject, finding.text);
    if (!finding.remedy.empty()) say("      -> {}\n", finding.remedy);
    has_failed |= finding.health == Health::kFail;
  }
  if (json.is_wanted()) write_whole(json, json_of(findings, has_failed));
  return has_failed ? kExitResource : kExitOk;
}

}  // namespace sluice
