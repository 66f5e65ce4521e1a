#include "gpu/cuda/cuda_memory.h"

#include <cuda_runtime.h>

#include <utility>

#include <fmt/format.h>

#include <sluice/units.h>
#include "gpu/cuda/cuda_current_device.h"
#include "gpu/cuda/cuda_error.h"

namespace sluice {
namespace {

constexpr std::uint64_t kAlignBytes = 4_KiB;  // CUDA promises 256 bytes

}  // namespace

std::uint64_t cuda_unused_bytes(int ordinal) {
  const CudaCurrentDevice current(ordinal);
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  SLUICE_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  return free_bytes;
}

CudaMemory::CudaMemory(int ordinal, std::string name, std::uint64_t capacity_bytes,
                       CudaMemorySource source)
    : ordinal_(ordinal),
      name_(std::move(name)),
      source_(std::move(source)),
      ledger_(capacity_bytes) {
  const CudaCurrentDevice current(ordinal_);
  cudaStream_t stream = nullptr;
  SLUICE_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  fill_stream_ = stream;
}

CudaMemory::~CudaMemory() {
  SLUICE_CHECK(allocations_.empty(), "memory goes before its device");
  const CudaCurrentDevice current(ordinal_, std::nothrow);
  (void)cudaStreamDestroy(static_cast<cudaStream_t>(fill_stream_));
}

std::byte* CudaMemory::allocate(std::uint64_t size_bytes, std::string_view purpose) {
  const CudaCurrentDevice current(ordinal_);
  const std::scoped_lock lock(mutex_);
  ledger_.check_fits(size_bytes, purpose);
  if (size_bytes == 0) return nullptr;
  void* base = nullptr;
  const cudaError_t status = !source_.allocate ? cudaMalloc(&base, size_bytes + kAlignBytes)
                             : source_.allocate(&base, size_bytes + kAlignBytes)
                                 ? cudaSuccess
                                 : cudaErrorMemoryAllocation;
  if (status != cudaSuccess) {
    (void)cudaGetLastError();  // else the next launch on this thread would look failed
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    throw ledger_.refusal(size_bytes, purpose,
                          fmt::format("{} has {} free of {} ({})", name_, format_bytes(free_bytes),
                                      format_bytes(total_bytes), cudaGetErrorString(status)));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(base);
  std::byte* const memory =
      static_cast<std::byte*>(base) + (align_up(address, kAlignBytes) - address);
  ledger_.add(memory, size_bytes, purpose);
  allocations_.emplace(memory, Allocation{base, size_bytes});
  try {
    const auto stream = static_cast<cudaStream_t>(fill_stream_);
    SLUICE_CUDA(cudaMemsetAsync(memory, 0, size_bytes, stream));
    SLUICE_CUDA(cudaStreamSynchronize(stream));
  } catch (...) {
    ledger_.remove(memory);
    allocations_.erase(memory);
    (void)give_back(base);
    throw;
  }
  return memory;
}

int CudaMemory::free(std::byte* memory) noexcept {
  if (memory == nullptr) return cudaSuccess;
  void* base = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    ledger_.remove(memory);
    base = allocations_.at(memory).base;
    allocations_.erase(memory);
  }
  return give_back(base);  // not under the lock: it waits for work that other threads must release
}

int CudaMemory::give_back(void* base) const noexcept {
  const CudaCurrentDevice current(ordinal_, std::nothrow);
  if (!source_.free) return cudaFree(base);
  (void)cudaDeviceSynchronize();  // as cudaFree does
  return source_.free(base) ? cudaSuccess : cudaErrorUnknown;
}

std::uint64_t CudaMemory::capacity_bytes() const {
  const std::scoped_lock lock(mutex_);
  return ledger_.capacity_bytes();
}

std::uint64_t CudaMemory::allocated_bytes() const {
  const std::scoped_lock lock(mutex_);
  return ledger_.taken_bytes();
}

bool CudaMemory::contains(const std::byte* memory) const {
  const std::scoped_lock lock(mutex_);
  auto entry = allocations_.upper_bound(memory);
  if (entry == allocations_.begin()) return false;
  --entry;
  return memory < entry->first + entry->second.size_bytes;
}

int CudaMemory::ask_foreign(const std::byte* memory, bool& is_foreign) const {
  const CudaCurrentDevice current(ordinal_, std::nothrow);
  cudaPointerAttributes found{};
  const cudaError_t status = cudaPointerGetAttributes(&found, memory);
  is_foreign = status == cudaSuccess &&
               (found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged);
  return status;
}

// Whole pages in one call, because a copy may not straddle two registrations.
void CudaMemory::register_host(std::span<std::byte> memory) {
  if (memory.empty()) return;
  SLUICE_CHECK(is_aligned(reinterpret_cast<std::uintptr_t>(memory.data()), kAlignBytes),
               "host memory that is registered begins at a page");
  const CudaCurrentDevice current(ordinal_);
  const cudaError_t status = cudaHostRegister(memory.data(), align_up(memory.size(), kAlignBytes),
                                              cudaHostRegisterPortable);
  if (status == cudaSuccess) return;
  // Not the whole text of cuda_error(), whose advice is about the GPU's memory.
  throw Error(
      cuda_error(status, "cudaHostRegister", __FILE__, __LINE__).code(),
      fmt::format("cannot page-lock {} of host memory: cudaHostRegister: {} ({}): {}; lower "
                  "memory.host, or raise the limit of locked memory (ulimit -l, a "
                  "container's memory)",
                  format_bytes(memory.size()), cudaGetErrorName(status), static_cast<int>(status),
                  cudaGetErrorString(status)));
}

}  // namespace sluice
