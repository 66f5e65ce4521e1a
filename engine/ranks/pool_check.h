// The functions compare an engine's pools with the free memory of its host and its device, before
// any pool is allocated. Without the check, a process whose pools exceed the free memory would be
// killed by the kernel in the middle of a step, without a message. Ranks on one host share the
// host's memory.
//
// Thread rule: the application's thread. All ranks call each function at the same point.
#pragma once

#include <string>
#include <vector>

#include "engine/plan/host_memory.h"
#include "engine/plan/placement.h"
#include "engine/ranks/ranks.h"

namespace sluice {

// The memory that the host has for this rank. Must be called before any rank has its pools.
HostMemory host_of(const Device& device, Ranks& ranks);

// The function checks the pools. `host` was measured before the ranks took their buffers. Returns
// notes for the user.
// Fails with kOutOfMemory under RoomCheck::kError, on all ranks. The message names the pools and
// says what to lower.
std::vector<std::string> check_pools(RoomCheck check, const Placement& placement, HostMemory host,
                                     const Device& device, Ranks& ranks);

}  // namespace sluice
