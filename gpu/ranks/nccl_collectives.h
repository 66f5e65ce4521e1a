// Collectives between GPUs, by NCCL. Reductions are exact by default. The ranks exchange their
// elements all to all, and each rank adds its part in rank order. So the bits equal those of the
// host's collectives. The bits do not depend on the order in which NCCL would reduce a message of
// that size.
//
// Thread rule: as Collectives. Failures are reported on a separate thread.
// Failure: NCCL reports that a rank is gone, but seldom says which rank. So messages name this
// rank's operation.
#pragma once

#include <memory>
#include <string>

#include <sluice/collectives.h>
#include "gpu/ranks/nccl_communicator.h"

namespace sluice {

enum class NcclReduction : std::uint8_t {
  kExact,  // all to all, then a sum in rank order
  // This kind stands for NCCL's own reduce-scatter and all-reduce, if the types are equal. An
  // all-reduce moves about half as many bytes as kExact. Sums are in fp32 or in the elements' type.
  // The order of the additions changes with length and topology.
  kPlain,
};

struct NcclOptions {
  double timeout_s = 120;  // as in HostCollectivesOptions
  NcclReduction reduction = NcclReduction::kExact;
  std::string library = {};  // empty = libnccl.so.2
};

// The reason why NCCL cannot be used. The result is empty if NCCL can be used.
std::string why_no_nccl(const std::string& library = "");
// The version of NCCL, such as "2.28.9", and a sentence behind it about what the version cannot do.
// Fails with kUnsupported.
std::string describe_nccl(const std::string& library = "");
// Sets the environment variables that NCCL and the CUDA runtime read at their first call. With
// these variables, NCCL makes the connections when the communicator is made, instead of at the
// first operation. The function also calls prepare_cuda_environment(). The function does not change
// variables that are already set.
// Requires: no other thread runs yet.
void prepare_nccl_environment();

// Makes an id. Rank 0 makes the id and sends it to all ranks before they join.
// Fails with kUnsupported or kRanks.
NcclId make_nccl_id(const std::string& library = "");
// A source of memory for CudaDeviceOptions. Copy engines can gather into this memory. If NCCL's
// version has no such memory, the source gives plain memory.
// Fails with kUnsupported.
CudaMemorySource nccl_memory_source(const std::string& library = "");

// Makes the collectives of one of `rank_count` ranks. Each rank calls this function. `device` must
// outlive the collectives.
// Fails with kUnsupported, kRanks or kOutOfMemory.
std::unique_ptr<Collectives> make_nccl_collectives(CudaDevice& device, const NcclOptions& options,
                                                   const NcclId& id, std::uint32_t rank,
                                                   std::uint32_t rank_count);

}  // namespace sluice
