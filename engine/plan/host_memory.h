// The functions compare the host memory that a run takes with the host's free memory. So a run that
// the kernel would kill halfway is refused before it takes any memory. The functions also choose
// budgets for a config without budgets. The functions read the topology, and are otherwise pure.
// Any thread may call them.
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
  std::uint64_t beside_bytes = 0;  // the application's: its program, and activations if it keeps
                                   // them on the host
  std::string_view beside = "its program, and the activations that it keeps";
  std::uint32_t ranks = 1;  // that share the host, each with as much memory
  MemoryRoom room;          // of all ranks, before any of them has taken its pools

  std::uint64_t sum_bytes() const { return device_pool_bytes + host_pool_bytes + beside_bytes; }
  std::uint64_t room_bytes() const { return room.size_bytes / ranks; }  // of one rank
};

// The memory for the pools of this process, as if no other rank were on the host.
HostMemory process_memory(bool device_is_host);

// Returns a message if the sum is more than the room. The message lists the parts and says what to
// lower.
std::optional<std::string> shortage_of(const HostMemory& memory);
// Fails with kOutOfMemory if there is a shortage.
void require_room(const HostMemory& memory);
// Treats a shortage as `check` says. Returns a note for the user, or "".
// Fails with kOutOfMemory if there is a shortage and `check` is kError.
std::string settle_shortage(const std::optional<std::string>& shortage, RoomCheck check);

// The default budgets for `memory_bytes`, which is a machine's memory or a rank's part of it. The
// host gets half, and the device gets a quarter if the host is the device.
std::uint64_t default_device_bytes(std::uint64_t memory_bytes);
std::uint64_t default_host_bytes(std::uint64_t memory_bytes);
// Returns the memory for which default_host_bytes() is `budget_bytes`.
std::uint64_t memory_of_default_host(std::uint64_t budget_bytes);

// Fills in the budgets missing in `memory` with the defaults for one rank's part of the machine. If
// the device is the host, the device gets at most half of the memory that the application leaves
// free, and the host gets at most the rest. The pools in `host` are ignored.
Config::Memory with_budgets(Config::Memory memory, const HostMemory& host);

}  // namespace sluice
