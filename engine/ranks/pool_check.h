// Compares an engine's pools with the free memory of its host and its device, before any pool is
// allocated: the kernel kills a process that takes more, in the middle of a step and without a
// message. Ranks on one host share its memory.
//
// Thread rule: the application's thread. Every rank calls each in the same place.
#pragma once

#include <string>
#include <vector>

#include "engine/plan/host_memory.h"
#include "engine/plan/placement.h"
#include "engine/ranks/ranks.h"

namespace sluice {

// The memory that this rank's host has for it. Call it before any rank has its pools.
HostMemory host_of(const Device& device, Ranks& ranks);

// `host` dates from before the ranks took their buffers, which they have by now. Returns notes for
// the user.
// Fails with: kOutOfMemory naming the pools and what to lower, under RoomCheck::kError; on all
// ranks.
std::vector<std::string> check_pools(RoomCheck check, const Placement& placement, HostMemory host,
                                     const Device& device, Ranks& ranks);

}  // namespace sluice
