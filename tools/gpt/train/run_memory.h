// These functions divide the machine's memory for `sluice train` and `sluice plan`. The functions
// compute the memory that the program and its activations need. The functions also compute default
// budgets, and check that everything fits.
// Thread rule: any thread.
#pragma once

#include <cstdint>

#include <sluice/plan.h>
#include "engine/plan/host_memory.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

struct Placement;

// Returns the size in bytes of the activations that the run keeps outside of the engine's pools. If
// `device_is_host` is true, the activations lie on the host. Otherwise, the activations lie on a
// GPU.
std::uint64_t kept_activation_bytes(const TrainConfig& config, bool device_is_host);

// Returns the memory that the `ranks` ranks of this host share. The result also has the bytes that
// each rank needs outside of its pools. If the device is the host, these bytes include
// `activation_bytes`. Several ranks divide all memory of the machine, so that all ranks get the
// same budgets. A single rank takes only the free memory into account.
HostMemory share_of_host(bool device_is_host, std::uint64_t activation_bytes, std::uint32_t ranks);

// Fills in the budgets that are "auto". A GPU's budget stays "auto". With "auto", the engine uses
// the GPU memory that is free when the engine is made.
// Fails with kOutOfMemory if the application leaves no memory for the budgets.
void settle_budgets(Config::Memory& memory, const HostMemory& host);

// Returns a description of the machine. Each of `rank_count` ranks computes its plan from this
// description.
RunMachine machine_of(const HostMemory& host, std::uint32_t rank_count);

// Returns `host` with the pool sizes of `placement`.
HostMemory with_pools(HostMemory host, const Placement& placement);

// Compares two amounts of memory: the memory that the ranks of this host will need, and the free
// memory. The result has both numbers. If memory.check is "warn", a shortage is only printed. Must
// be called before any rank has its pools. settle_budgets() and resolve_order() must have replaced
// "auto" in `config`.
// Fails with kOutOfMemory if a budget is too small, or if the ranks need more memory than is free.
HostMemory check_memory(const TrainConfig& config, const RunMachine& machine, HostMemory host);

}  // namespace sluice
