// A loop of plain CUDA copies. The loop is the baseline for measurements of the device's copies.
// The loop and the library's device copy the same bytes, but the loop calls cudaMemcpyAsync itself.
// Each direction has its own stream. Thread rule: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include <sluice/cuda_device.h>

namespace sluice {

// The page-locked host memory and the device memory for the copies in one direction. Each memory
// has `size_bytes` bytes. If a pointer is null, there are no copies in this direction.
struct CopyEnds {
  std::byte* host = nullptr;
  std::byte* device = nullptr;
};

// The function copies in both directions at the same time. `up` has the memory for the copies to
// the device, and `down` has the memory for the copies to the host. The function repeats the copies
// `rounds` times, each time in pieces of `piece_bytes`. Returns the elapsed seconds.
// Fails with the errors of SLUICE_CUDA.
double plain_copies_s(CudaDevice& device, const CopyEnds& up, const CopyEnds& down,
                      std::uint64_t size_bytes, std::uint64_t piece_bytes, unsigned rounds);

}  // namespace sluice
