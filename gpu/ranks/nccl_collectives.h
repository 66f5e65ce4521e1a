// Collectives between GPUs, by NCCL. Reductions are exact unless asked otherwise: the ranks
// exchange their elements all to all and each adds its part in rank order. So the bits are those of
// the host's collectives, whatever NCCL would do with a message of that size.
//
// Thread rule: as Collectives. Failures are reported on a separate thread.
// Failure: NCCL says that a rank is gone, but seldom which, so messages name this rank's operation.
#pragma once

#include <memory>
#include <string>

#include <sluice/collectives.h>
#include "gpu/ranks/nccl_communicator.h"

namespace sluice {

enum class NcclReduction : std::uint8_t {
  kExact,  // all to all, then a sum in rank order
  // NCCL's own reduce-scatter and all-reduce where the types are equal. An all-reduce moves about
  // half the bytes; sums are in fp32 or in the elements' type, in an order that changes with length
  // and topology.
  kPlain,
};

struct NcclOptions {
  double timeout_s = 120;  // as HostCollectivesOptions
  NcclReduction reduction = NcclReduction::kExact;
  std::string library = {};  // empty = libnccl.so.2
};

// The reason why there is no NCCL; empty when there is one.
std::string why_no_nccl(const std::string& library = "");
std::string nccl_version(const std::string& library = "");
// Sets the environment that NCCL and the CUDA runtime read at their first call: NCCL makes
// connections with the communicator and not at the first operation; includes
// prepare_cuda_environment(). Variables that are set already stay.
// Requires: no other thread runs yet.
void prepare_nccl_environment();

// Makes an id on rank 0, which sends it to all ranks before they join.
// Fails with: kUnsupported, kRanks.
NcclId make_nccl_id(const std::string& library = "");
// Memory that copy engines gather into, for CudaDeviceOptions; plain memory where NCCL's version
// has no such kind.
// Fails with: kUnsupported.
CudaMemorySource nccl_memory_source(const std::string& library = "");

// Makes the collectives of one of `rank_count` ranks; each rank calls it. `device` must outlive it.
// Fails with: kUnsupported, kRanks, kOutOfMemory.
std::unique_ptr<Collectives> make_nccl_collectives(CudaDevice& device, const NcclOptions& options,
                                                   const NcclId& id, std::uint32_t rank,
                                                   std::uint32_t rank_count);

}  // namespace sluice
