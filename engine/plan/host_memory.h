// The functions compare two amounts: the host memory that a run takes, and the host's free memory.
// The functions refuse a run that needs too much memory, so that the kernel does not kill the run
// halfway. If a config has no budgets, the functions choose budgets. The functions read the
// topology, and are otherwise pure. Any thread may call them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <sluice/config.h>
#include "base/memory_room.h"

namespace sluice {

struct HostMemory {
  bool device_is_host = true;           // otherwise the device has its own memory
  std::uint64_t device_pool_bytes = 0;  // if the device is the host
  std::uint64_t host_pool_bytes = 0;
  std::uint64_t beside_bytes = 0;  // of the application: its program, and the activations that it
                                   // keeps on the host
  std::string_view beside = "its program, and the activations that it keeps";
  std::uint32_t ranks = 1;  // ranks that share the host; all ranks take the same amount of memory
  MemoryRoom room;          // for all ranks, before any rank has taken its pools

  std::uint64_t sum_bytes() const { return device_pool_bytes + host_pool_bytes + beside_bytes; }
  std::uint64_t room_bytes() const { return room.size_bytes / ranks; }  // of one rank
};

// Returns the memory for this process's pools, as if no other rank were on the host.
HostMemory process_memory(bool device_is_host);

// Returns a message if the run needs more host memory than is free. The message lists the memory of
// each part, and says how the run can need less memory.
std::optional<std::string> shortage_of(const HostMemory& memory);
// Fails with kOutOfMemory if the run needs more host memory than is free.
void require_room(const HostMemory& memory);
// If host memory is short, `check` decides whether the call fails, returns a note or ignores the
// shortage. Returns a note for the user, or "".
// Fails with kOutOfMemory if there is a shortage and `check` is kError.
std::string settle_shortage(const std::optional<std::string>& shortage, RoomCheck check);

// The default budgets for `memory_bytes`. `memory_bytes` is the memory of a machine, or one rank's
// part of this memory. The host's budget is half of `memory_bytes`. If the device is the host, the
// device's budget is a quarter of `memory_bytes`.
std::uint64_t default_device_bytes(std::uint64_t memory_bytes);
std::uint64_t default_host_bytes(std::uint64_t memory_bytes);
// Returns the memory size that gives the host a default budget of `budget_bytes`.
std::uint64_t memory_of_default_host(std::uint64_t budget_bytes);

// Sets the budgets that are missing in `memory` to the defaults for one rank's part of the machine.
// If the device is the host, the device's budget is at most half of the memory that the application
// leaves free. The host's budget is at most the memory that the application and a device on the
// host leave free. The function ignores the pools in `host`.
Config::Memory with_budgets(Config::Memory memory, const HostMemory& host);

}  // namespace sluice
