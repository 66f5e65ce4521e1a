// How much memory this process may still take before the kernel ends it: what is free on the
// machine, and what the limits of its control groups leave. Pure but for the files that it reads.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

struct MemoryRoom {
  // With what this process has already. Memory that others use counts as taken; page cache, which
  // the kernel gives up, does not. Swap does not count: a step would wait for it.
  std::uint64_t size_bytes = 0;
  std::string bound;  // by what: "the machine", "the cgroup's limit of 200 MiB"
};

MemoryRoom memory_room();

// As memory_room(), from other files, for tests: `proc` in the form of /proc ("meminfo",
// "self/status", "self/cgroup"), `cgroup_root` in that of /sys/fs/cgroup. A file that is missing
// limits nothing.
MemoryRoom read_memory_room(const std::string& proc, const std::string& cgroup_root);

}  // namespace sluice
