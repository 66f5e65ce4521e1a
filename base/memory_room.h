// The amount of memory that this process can use before the kernel kills the process. This amount
// is called the room. The room is the machine's free memory, limited by the process's control
// groups. The functions read files, and are otherwise pure.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

struct MemoryRoom {
  // The room includes the memory that this process already uses. If other processes use memory,
  // this memory counts as taken. The page cache counts as free memory, because the kernel can drop
  // the cache. Swap does not count as memory, because a step would wait for swap.
  std::uint64_t size_bytes = 0;
  std::string bound;            // the tightest limit, such as "the cgroup's limit of 200 MiB"
  std::uint64_t own_bytes = 0;  // the part of size_bytes that this process already uses
  // Processes on one machine, or in one control group, share one room. Processes that share a room
  // get the same id.
  std::uint64_t id = 0;
};

MemoryRoom memory_room();

// Does the same as memory_room(), but reads other files, for tests. `proc` replaces the folder
// /proc with the files "meminfo", "self/status" and "self/cgroup". `cgroup_root` replaces the
// folder /sys/fs/cgroup. A missing file sets no limit.
MemoryRoom read_memory_room(const std::string& proc, const std::string& cgroup_root);

}  // namespace sluice
