// The memory of a CUDA device: zero-filled allocations under a budget, and page-locked host memory.
// Allocated and freed a few times per run, in large pieces that their owners cut up.
//
// Thread rule: every function from any thread.
// Invariant: the ledger knows every allocation, with as many bytes as were asked for; the GPU takes
// up to 4 KiB more for each.
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

// The memory of a GPU that no process has taken.
// Fails with: as SLUICE_CUDA.
std::uint64_t cuda_unused_bytes(int ordinal);

class CudaMemory {
 public:
  // `name`: the device's name, for messages.
  // Fails with: as SLUICE_CUDA.
  CudaMemory(int ordinal, std::string name, std::uint64_t capacity_bytes, CudaMemorySource source);
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  // Requires: all memory has been freed.
  ~CudaMemory();

  // As Device::allocate(), with the GPU's own report where it has less memory than the budget says.
  std::byte* allocate(std::uint64_t size_bytes, std::string_view purpose);
  // Waits for the device's work. Returns the cudaError_t of freeing.
  int free(std::byte* memory) noexcept;
  std::uint64_t capacity_bytes() const;
  std::uint64_t allocated_bytes() const;
  // The most that allocate() can still get from cudaMalloc; another source of memory does not tell,
  // it only refuses.
  std::uint64_t unused_bytes() const {
    return source_.allocate ? UINT64_MAX : cuda_unused_bytes(ordinal_);
  }
  // Whether `memory` points into an allocation.
  bool contains(const std::byte* memory) const;

  // As Device::register_host_memory().
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
  void* fill_stream_ = nullptr;    // a cudaStream_t that fills fresh memory

  mutable std::mutex mutex_;
  // Guarded by mutex_.
  MemoryLedger ledger_;
  std::map<const std::byte*, Allocation> allocations_;
};

}  // namespace sluice
