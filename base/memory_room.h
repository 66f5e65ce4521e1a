// How much memory this process may still take before the kernel kills it: the memory free on the
// machine, within the limits of its control groups. Reads files, and is pure otherwise.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

struct MemoryRoom {
  // Includes what this process already has. Memory of other processes counts as taken; page cache
  // does not, because the kernel gives it up. Swap does not count: a step would wait for it.
  std::uint64_t size_bytes = 0;
  std::string bound;            // the limit: "the machine", "the cgroup's limit of 200 MiB"
  std::uint64_t own_bytes = 0;  // the part of size_bytes that this process already has
  // Equal for processes that share this room: those of one machine, or of one control group.
  std::uint64_t id = 0;
};

MemoryRoom memory_room();

// As memory_room(), but from other files, for tests: `proc` stands for /proc ("meminfo",
// "self/status", "self/cgroup"), `cgroup_root` for /sys/fs/cgroup. A missing file sets no
// limit.
MemoryRoom read_memory_room(const std::string& proc, const std::string& cgroup_root);

}  // namespace sluice
