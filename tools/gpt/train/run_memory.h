// How `sluice train` and `sluice plan` deal out the machine's memory: what the program and its
// activations take, budgets where the config names none, and whether all of it fits. Any thread.
#pragma once

#include <cstdint>

#include <sluice/plan.h>
#include "engine/plan/host_memory.h"
#include "tools/gpt/train/train_config.h"

namespace sluice {

// Bytes of activations that the run keeps beside the engine's pools: on the host, or with
// `device_is_host` false on a GPU.
std::uint64_t kept_activation_bytes(const TrainConfig& config, bool device_is_host);

// The memory that `ranks` on this host have to share, and what each takes beside its pools, with
// `activation_bytes` of activations. Several ranks deal out all memory of the machine, so that all
// get the same budgets; one rank deals out the free memory.
HostMemory share_of_host(bool device_is_host, std::uint64_t activation_bytes, std::uint32_t ranks);

// Fills in the budgets that are "auto"; those of a GPU stay what is free there when the engine is
// made.
// Fails with: kOutOfMemory when the application leaves nothing to deal out.
void settle_budgets(Config::Memory& memory, const HostMemory& host);

// The machine as each of `rank_count` ranks plans for it.
RunMachine machine_of(const HostMemory& host, std::uint32_t rank_count);

// Compares the memory that each of `ranks` will take of this host with what is free, and returns
// it; memory.check "warn" only prints a shortage. To be called before any of them has its pools.
// `config` has budgets and order.
// Fails with: kOutOfMemory for a budget that is too small, and when the sum is too large.
HostMemory check_memory(const TrainConfig& config, const RunMachine& machine, HostMemory host);

}  // namespace sluice
