// Collectives between GPUs, by NCCL. Reductions are exact unless asked otherwise: the ranks
// exchange their elements all to all and each adds what it gets in rank order, so that the bits are
// those of the host's collectives, whatever NCCL would do with a message of that size.
//
// Thread rule: as Collectives. A failure is told on a thread of its own.
// Failure: NCCL says that a rank is gone, seldom which: messages name this rank's operation.
#pragma once

#include <memory>
#include <string>

#include <sluice/collectives.h>
#include "gpu/ranks/nccl_communicator.h"

namespace sluice {

enum class NcclReduction : std::uint8_t {
  kExact,  // all to all, then a sum in rank order
  // NCCL's own reduce-scatter and all-reduce where the types are equal: about half the bytes for an
  // all-reduce, sums in fp32 or in the elements' type and in an order that changes with length and
  // topology.
  kPlain,
};

struct NcclOptions {
  double timeout_s = 120;  // as HostCollectivesOptions
  NcclReduction reduction = NcclReduction::kExact;
  std::string library = {};  // empty = libnccl.so.2
};

// Why there is no NCCL; empty when there is one.
std::string why_no_nccl(const std::string& library = "");
std::string nccl_version(const std::string& library = "");
// What NCCL and the CUDA runtime read from the environment when they are first called: connections
// are made with the communicator and not by whoever comes first; and prepare_cuda_environment().
// Nothing that is set there already changes.
// Requires: no other thread runs yet.
void prepare_nccl_environment();

// Rank 0's goes to all ranks before they join.
// Fails with: kUnsupported, kRanks.
NcclId make_nccl_id(const std::string& library = "");
// Memory that copy engines gather into, for CudaDeviceOptions; plain memory where the version has
// none.
// Fails with: kUnsupported.
CudaMemorySource nccl_memory_source(const std::string& library = "");

// What rank `rank` of `rank_count` uses. Every rank calls it. `device` must outlive it.
// Fails with: kUnsupported, kRanks, kOutOfMemory.
std::unique_ptr<Collectives> make_nccl_collectives(CudaDevice& device, const NcclOptions& options,
                                                   const NcclId& id, std::uint32_t rank,
                                                   std::uint32_t rank_count);

}  // namespace sluice
