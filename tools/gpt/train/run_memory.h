// How `sluice train` and `sluice plan` divide the machine's memory. The functions cover the needs
// of the program and its activations, default budgets, and the check that everything fits. Any
// thread.
#pragma once

#include <cstdint>

#include <sluice/plan.h>
#include "engine/plan/host_memory.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

struct Placement;

// The bytes of activations that the run keeps beside the engine's pools. These activations lie on
// the host if `device_is_host`. If `device_is_host` is false, the activations lie on a GPU.
std::uint64_t kept_activation_bytes(const TrainConfig& config, bool device_is_host);

// The memory that `ranks` on this host have to share, and the bytes that each rank takes beside its
// pools. These bytes include `activation_bytes` of activations. Several ranks divide all memory of
// the machine, so that all get the same budgets. A single rank takes only the free memory into
// account.
HostMemory share_of_host(bool device_is_host, std::uint64_t activation_bytes, std::uint32_t ranks);

// Fills in the budgets that are "auto". A GPU's budget stays "auto". The engine then uses the
// memory that is free on the GPU when the engine is made.
// Fails with kOutOfMemory if the application leaves no memory for the budgets.
void settle_budgets(Config::Memory& memory, const HostMemory& host);

// The machine as each of `rank_count` ranks sees it when it plans.
RunMachine machine_of(const HostMemory& host, std::uint32_t rank_count);

// Returns the numbers of `host` with the pools of a placement.
HostMemory with_pools(HostMemory host, const Placement& placement);

// Compares the memory that the ranks of this host will take with the free memory, and returns these
// numbers. With memory.check "warn", a shortage is only printed. Must be called before any rank has
// its pools. Budgets and order in `config` must be settled.
// Fails with kOutOfMemory if a budget is too small, or if the sum is too large.
HostMemory check_memory(const TrainConfig& config, const RunMachine& machine, HostMemory host);

}  // namespace sluice
