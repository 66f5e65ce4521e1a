// Compares the host memory that a run takes with what is free there, so that a run which the kernel
// would end in the middle is refused before it takes anything. Also chooses budgets for a config
// that names none. Pure but for the topology; any thread.
#pragma once

#include <cstdint>

#include <sluice/config.h>
#include "base/memory_room.h"

namespace sluice {

struct HostMemory {
  bool device_is_host = true;           // else the device has memory of its own
  std::uint64_t device_pool_bytes = 0;  // if it is
  std::uint64_t host_pool_bytes = 0;
  std::uint64_t beside_bytes = 0;  // of the application: its program, and activations if it keeps
                                   // them on the host
  std::uint32_t ranks = 1;         // that share the host, each with as much
  MemoryRoom room;                 // of all of them, before any has taken its pools

  std::uint64_t sum_bytes() const { return device_pool_bytes + host_pool_bytes + beside_bytes; }
  std::uint64_t room_bytes() const { return room.size_bytes / ranks; }  // of one of them
};

// Fails with: kOutOfMemory when the sum is more than the room; the message lists what it is made
// of, and says what to lower.
void require_room(const HostMemory& memory);

// The default budgets of a machine, or of a rank's part of one: a quarter of its memory for the
// device, if that is the host, and half of it for the host.
std::uint64_t default_device_bytes(std::uint64_t memory_bytes);
std::uint64_t default_host_bytes(std::uint64_t memory_bytes);

// Where `memory` names no budget, the default of one rank's part of the machine: for the device, if
// that is the host, at most half of what `room_bytes` has beside the application; for the host at
// most the rest.
// The pools in `host` are ignored.
Config::Memory with_budgets(Config::Memory memory, const HostMemory& host);

}  // namespace sluice
