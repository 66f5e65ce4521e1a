// Enqueues several copies with one call of the driver (cuMemcpyBatchAsync, since CUDA 12.8). The
// driver's function is looked up at run time, because older drivers do not have this function.
//
// Thread rule: any thread may call every function.
#pragma once

#include <atomic>
#include <span>

#include <sluice/device.h>
#include "gpu/cuda/cuda_memory.h"

namespace sluice {

class CudaBatch {
 public:
  // `memory` is the memory of the current GPU, and must outlive the object.
  explicit CudaBatch(const CudaMemory& memory);

  // Returns whether copy() accepts `pieces`. There must be several pieces, and the driver must have
  // the function cuMemcpyBatchAsync. The source or the target of each piece must be in the GPU's
  // memory.
  bool takes(std::span<const CopyPiece> pieces) const;
  // Enqueues the copies on `stream`, a cudaStream_t of the GPU `ordinal`. Returns a cudaError_t. If
  // another GPU is the current GPU, nothing is enqueued. If the driver refuses to take several
  // copies at once, all copies are enqueued one by one from then on.
  // Requires: takes(pieces).
  int copy(std::span<const CopyPiece> pieces, void* stream, int ordinal);

 private:
  const CudaMemory& memory_;
  void* function_ = nullptr;  // constant after construction
  std::atomic<bool> is_refused_{false};
};

}  // namespace sluice
