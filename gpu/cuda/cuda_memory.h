// The memory of a CUDA device: zero-filled allocations under a budget, and page-locked host memory.
// A run allocates and frees memory only a few times, in large pieces. The owner of a piece divides
// the piece further.
//
// Thread rule: any thread may call every function.
// Invariant: the ledger lists every allocation, with the requested number of bytes. The GPU takes
// up to 4 KiB more for each allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>

#include <sluice/cuda_device.h>
#include "gpu/device/memory_ledger.h"

namespace sluice {

// Returns the number of bytes of GPU memory that no process has taken.
// Fails with the errors of SLUICE_CUDA.
std::uint64_t cuda_unused_bytes(int ordinal);

class CudaMemory {
 public:
  // `name` is the name of the device in messages.
  // Fails with the errors of SLUICE_CUDA.
  CudaMemory(int ordinal, std::string name, std::uint64_t capacity_bytes, CudaMemorySource source);
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  // Requires: all memory has been freed.
  ~CudaMemory();

  // Does the same as Device::allocate(). If the GPU has less memory than the budget says, the
  // message of the error includes the GPU's own report.
  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose);
  // The call waits for the device's work and frees the memory. Returns the resulting cudaError_t.
  int free(std::byte* memory) noexcept;
  std::uint64_t capacity_bytes() const;
  std::uint64_t allocated_bytes() const;
  // Returns the largest number of bytes that allocate() can still get from cudaMalloc. If the
  // memory has another source, the result is UINT64_MAX, because such a source reports no limit.
  std::uint64_t unused_bytes() const {
    return source_.allocate ? UINT64_MAX : cuda_unused_bytes(ordinal_);
  }
  // Returns whether `memory` points into one of the allocations.
  bool contains(const std::byte* memory) const;
  // The function sets `is_foreign` to true if `memory` is GPU memory that other code, such as
  // PyTorch, has allocated. Otherwise the function sets `is_foreign` to false. The function asks
  // the runtime, and returns the runtime's cudaError_t. This error may be an error of earlier work.
  int ask_foreign(const std::byte* memory, bool& is_foreign) const;

  // Does the same as Device::register_host_memory().
  void register_host(std::span<std::byte> memory);

 private:
  int give_back(void* base) const noexcept;

  struct Allocation {
    void* base;
    std::uint64_t size_bytes;
  };

  // Constant after construction.
  const int ordinal_;
  const std::string name_;
  const CudaMemorySource source_;  // empty = cudaMalloc
  void* fill_stream_ = nullptr;    // a cudaStream_t for filling fresh memory

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  MemoryLedger ledger_;
  std::map<const std::byte*, Allocation> allocations_;
};

}  // namespace sluice
