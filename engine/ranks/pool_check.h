// Holds an engine's pools against what its host and its device have free, before any is allocated:
// a process that takes more is ended by the kernel in the middle of a step, without a word. Ranks
// on one host share its memory.
//
// Thread rule: the application's thread. Every rank calls each in the same place.
#pragma once

#include <string>
#include <vector>

#include "engine/plan/host_memory.h"
#include "engine/plan/placement.h"
#include "engine/ranks/ranks.h"

namespace sluice {

// The memory that this rank's host has for it. To be called before any rank has its pools.
HostMemory host_of(const Device& device, Ranks& ranks);

// `host` has been asked for before ranks took buffers; they have them now. Returns notes for the
// user.
// Fails with: kOutOfMemory naming the pools and what to lower, under RoomCheck::kError; on all
// ranks.
std::vector<std::string> check_pools(RoomCheck check, const Placement& placement, HostMemory host,
                                     const Device& device, Ranks& ranks);

}  // namespace sluice
