// These collectives run between GPUs. NCCL connects the GPUs. Reductions are exact by default. Each
// rank receives its part of the elements from all other ranks, and adds these elements in rank
// order. So the results have the same bits as the results of the host's collectives. By default,
// NCCL's own reductions are not used, because their order of additions depends on the size of the
// message.
//
// Thread rule: the same as for Collectives. A separate thread reports failures.
// Failure: NCCL reports that a rank is gone, but seldom says which rank. So error messages name the
// operation of this rank.
#pragma once

#include <memory>
#include <string>

#include <sluice/collectives.h>
#include "gpu/ranks/nccl_communicator.h"

namespace sluice {

enum class NcclReduction : std::uint8_t {
  kExact,  // all to all, then a sum in rank order
  // If the source and the target have the same type, NCCL's own reduce-scatter and all-reduce are
  // used. With kPlain, an all-reduce moves about half as many bytes as with kExact. NCCL computes
  // the sums in fp32 or in the elements' type. The order of the additions depends on the length of
  // the data and on the topology.
  kPlain,
};

struct NcclOptions {
  double timeout_s = 120;  // as in HostCollectivesOptions
  // The time that NCCL has to end its work after a failure. If NCCL needs longer, the process ends
  // with a message: no wait for the GPU would return.
  double abort_s = 30;
  NcclReduction reduction = NcclReduction::kExact;
  std::string library = {};  // empty = libnccl.so.2
};

// Returns the reason why NCCL cannot be used. The result is empty if NCCL can be used.
std::string why_no_nccl(const std::string& library = "");
// Returns the version of NCCL, such as "2.28.9". If this version lacks abilities, the text also
// names the missing abilities. Fails with kUnsupported if NCCL cannot be used.
std::string describe_nccl(const std::string& library = "");
// Makes the id of a run. Rank 0 makes the id, and sends the id to all other ranks before they join.
// Fails with kUnsupported if NCCL cannot be used, and with kRanks if NCCL makes no id.
NcclId make_nccl_id(const std::string& library = "");
// Returns a source of memory for CudaDeviceOptions. Copy engines can gather data into this memory.
// If this version of NCCL has no memory for copy engines, the source gives plain memory. Fails with
// kUnsupported if NCCL cannot be used.
CudaMemorySource nccl_memory_source(const std::string& library = "");

// Makes the collectives of rank `rank`. Each rank calls this function. `device` must outlive the
// collectives.
// Fails with:
// - kUnsupported: NCCL cannot be used.
// - kRanks: NCCL has failed, or has waited for other ranks longer than the timeout.
// - kOutOfMemory: the GPU has no room.
std::unique_ptr<Collectives> make_nccl_collectives(CudaDevice& device, const NcclOptions& options,
                                                   const NcclId& id, std::uint32_t rank,
                                                   std::uint32_t rank_count);

}  // namespace sluice
