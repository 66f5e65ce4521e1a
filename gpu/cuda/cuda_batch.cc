#include "gpu/cuda/cuda_batch.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace sluice {
namespace {

// As in CUDA 12.8. Toolkits before it do not declare the call, and those since CUDA 13.0 declare
// another one under the same name. The version in the look-up says that this one is meant.
constexpr const char* kName = "cuMemcpyBatchAsync";
constexpr unsigned kSinceVersion = 12080;
constexpr std::size_t kPiecesMax = 32;  // as many as CopyRuns passes

struct Attributes {
  int source_order = 1;     // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  int source_hint[2] = {};  // for memory that CUDA moves by itself
  int target_hint[2] = {};
  unsigned flags = 1;  // CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
};
#if CUDA_VERSION >= 12080
static_assert(sizeof(Attributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(Attributes, flags) == offsetof(CUmemcpyAttributes, flags));
static_assert(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM == 1);
static_assert(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE == 1);
#endif

using Function = CUresult (*)(CUdeviceptr* targets, CUdeviceptr* sources, std::size_t* sizes,
                              std::size_t count, Attributes* attributes,
                              std::size_t* attribute_begins, std::size_t attribute_count,
                              std::size_t* failed, CUstream stream);

CUdeviceptr address_of(const void* memory) {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(memory));
}

int copy_each(std::span<const CopyPiece> pieces, void* stream) {
  for (const CopyPiece& piece : pieces) {
    const cudaError_t status =
        cudaMemcpyAsync(piece.target, piece.source, piece.size_bytes, cudaMemcpyDefault,
                        static_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) return static_cast<int>(status);
  }
  return cudaSuccess;
}

}  // namespace

CudaBatch::CudaBatch(const CudaMemory& memory) : memory_(memory) {
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(kName, &function_, kSinceVersion, cudaEnableDefault, &found);
#else
  // The newest that this runtime knows, which has no such call.
  const cudaError_t status = cudaErrorNotSupported;
  (void)kName;
  (void)kSinceVersion;
#endif
  if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) return;
  function_ = nullptr;
  (void)cudaGetLastError();  // otherwise the next launch on this thread would look failed
}

bool CudaBatch::takes(std::span<const CopyPiece> pieces) const {
  return pieces.size() > 1 && pieces.size() <= kPiecesMax && function_ != nullptr && !is_refused_ &&
         std::ranges::all_of(pieces, [this](const CopyPiece& piece) {
           return piece.size_bytes != 0 && piece.target != nullptr && piece.source != nullptr &&
                  (memory_.contains(piece.target) || memory_.contains(piece.source));
         });
}

// The driver takes the thread's context. A thread has none before its first call of the runtime
// that needs one, and the driver then refuses the copies as an invalid value.
int CudaBatch::copy(std::span<const CopyPiece> pieces, void* stream, int ordinal) {
  int current = 0;
  if (const cudaError_t status = cudaGetDevice(&current); status != cudaSuccess) return status;
  if (current != ordinal) return cudaErrorInvalidDevice;
  if (const cudaError_t status = cudaSetDevice(ordinal); status != cudaSuccess) return status;
  std::array<CUdeviceptr, kPiecesMax> targets;
  std::array<CUdeviceptr, kPiecesMax> sources;
  std::array<std::size_t, kPiecesMax> sizes;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    targets[i] = address_of(pieces[i].target);
    sources[i] = address_of(pieces[i].source);
    sizes[i] = pieces[i].size_bytes;
  }
  Attributes attributes;
  std::size_t first = 0;
  std::size_t failed = 0;
  const CUresult status = reinterpret_cast<Function>(function_)(
      targets.data(), sources.data(), sizes.data(), pieces.size(), &attributes, &first, 1, &failed,
      static_cast<CUstream>(stream));
  // The runtime has the driver's numbers for the errors that both have.
  if (status != CUDA_ERROR_NOT_SUPPORTED) return static_cast<int>(status);
  is_refused_ = true;
  return copy_each(pieces, stream);
}

}  // namespace sluice
