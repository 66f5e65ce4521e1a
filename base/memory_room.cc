#include "base/memory_room.h"

#include <sys/stat.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/cgroup.h"

namespace sluice {
namespace {

// Returns nothing for a missing file, and for a word such as "max".
std::optional<std::uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  std::uint64_t value = 0;
  if (!(file >> text)) return std::nullopt;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (status != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// The value behind `name` in lines of "name value ...".
std::optional<std::uint64_t> value_of(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    const std::size_t begin = line.find_first_not_of(" \t", name.size());
    std::uint64_t value = 0;
    if (begin != std::string::npos &&
        std::from_chars(line.data() + begin, line.data() + line.size(), value).ec == std::errc{})
      return value;
  }
  return std::nullopt;
}

// Names the running kernel, and one control group of it. Containers see other paths to a group, but
// the same inode.
std::uint64_t id_of(const std::string& proc, const std::string& folder) {
  std::ifstream file(proc + "/sys/kernel/random/boot_id");
  std::string boot;
  file >> boot;
  struct stat found {};
  if (folder.empty() || ::stat(folder.c_str(), &found) != 0) return std::hash<std::string>()(boot);
  return std::hash<std::string>()(fmt::format("{} {}", boot, found.st_ino));
}

std::uint64_t less(std::uint64_t from, std::uint64_t what) {
  return from - std::min(from, what);
}

struct GroupFiles {
  const char* limit;
  const char* name;
  const char* usage;
  // This group's caches and those below it; the kernel drops them when it needs memory.
  std::initializer_list<const char*> caches;
};

}  // namespace

MemoryRoom read_memory_room(const std::string& proc, const std::string& cgroup_root) {
  const std::uint64_t own_bytes = value_of(proc + "/self/status", "RssAnon:").value_or(0) << 10;
  MemoryRoom room{.size_bytes = std::numeric_limits<std::uint64_t>::max(), .bound = "nothing"};
  if (const auto free_kib = value_of(proc + "/meminfo", "MemAvailable:"))
    room = {.size_bytes = (*free_kib << 10) + own_bytes, .bound = "the machine"};
  std::string bounding_folder;
  const GroupFiles kinds[] = {
      {"/memory.max",
       "limit",
       "/memory.current",
       {"inactive_file ", "active_file ", "slab_reclaimable "}},
      // Beyond it the kernel stops each allocation for a while and takes back what it can.
      {"/memory.high",
       "memory.high",
       "/memory.current",
       {"inactive_file ", "active_file ", "slab_reclaimable "}},
      {"/memory.limit_in_bytes",
       "limit",
       "/memory.usage_in_bytes",
       {"total_inactive_file ", "total_active_file "}}};
  for (const std::string& folder : cgroup_folders(proc + "/self/cgroup", cgroup_root, {"memory"})) {
    for (const GroupFiles& files : kinds) {
      const auto limit_bytes = number_in(folder + files.limit);
      if (!limit_bytes) continue;
      std::uint64_t used_bytes = less(number_in(folder + files.usage).value_or(0), own_bytes);
      // Without its statistics it is unknown how much of that is cache; it may be all of it.
      if (!value_of(folder + "/memory.stat", *files.caches.begin())) used_bytes = 0;
      for (const char* const cache : files.caches)
        used_bytes = less(used_bytes, value_of(folder + "/memory.stat", cache).value_or(0));
      const std::uint64_t free_bytes = less(*limit_bytes, used_bytes);
      if (free_bytes >= room.size_bytes) continue;
      room = {
          .size_bytes = free_bytes,
          .bound = fmt::format("the cgroup's {} of {}", files.name, format_bytes(*limit_bytes))};
      bounding_folder = folder;
    }
  }
  room.own_bytes = std::min(own_bytes, room.size_bytes);
  room.id = id_of(proc, bounding_folder);
  return room;
}

MemoryRoom memory_room() {
  return read_memory_room("/proc", "/sys/fs/cgroup");
}

}  // namespace sluice
