// gpu/ranks/nccl_collectives.h for builds without NCCL or without CUDA.
#include <sluice/error.h>
#include "gpu/ranks/nccl_collectives.h"

namespace sluice {

std::string why_no_nccl(const std::string&) {
  return "this build has no NCCL (SLUICE_NCCL, SLUICE_CUDA)";
}

std::string describe_nccl(const std::string& library) {
  throw Error(ErrorCode::kUnsupported, why_no_nccl(library));
}

void prepare_nccl_environment() {}

NcclId make_nccl_id(const std::string& library) {
  throw Error(ErrorCode::kUnsupported, why_no_nccl(library));
}

CudaMemorySource nccl_memory_source(const std::string& library) {
  throw Error(ErrorCode::kUnsupported, why_no_nccl(library));
}

std::unique_ptr<Collectives> make_nccl_collectives(CudaDevice&, const NcclOptions& options,
                                                   const NcclId&, std::uint32_t, std::uint32_t) {
  throw Error(ErrorCode::kUnsupported, why_no_nccl(options.library));
}

}  // namespace sluice
