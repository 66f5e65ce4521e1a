// The functions compare an engine's pools with the free memory of the host and the device, before
// any pool is allocated. Without this check, the kernel would kill a process whose pools exceed the
// free memory. The process would end in the middle of a step, without a message. Ranks on one host
// share the host's memory.
//
// Thread rule: the application's thread. All ranks call each function at the same point.
#pragma once

#include <string>
#include <vector>

#include "engine/plan/host_memory.h"
#include "engine/plan/placement.h"
#include "engine/ranks/ranks.h"

namespace sluice {

// Returns the memory that the host has for this rank. Must be called before any rank has allocated
// its pools.
HostMemory host_of(const Device& device, Ranks& ranks);

// Checks the pools. `host` must have been measured before the ranks allocated their buffers.
// Returns notes for the user.
// Fails with kOutOfMemory on all ranks if there is a shortage and `check` is RoomCheck::kError. The
// message names the pools, and says which setting should be lower.
std::vector<std::string> check_pools(RoomCheck check, const Placement& placement, HostMemory host,
                                     const Device& device, Ranks& ranks);

}  // namespace sluice
